//! Which target blocks a drafter reads, as zero-based indices of the block whose output is taken.

use crate::error::ModelError;

/// The published choice of EAGLE-3 for a target of N blocks: `[1, N/2 - 1, N - 4]`; `None` where these
/// are not three distinct blocks.
pub fn low_middle_high(num_layers: usize) -> Option<Vec<usize>> {
    (num_layers >= 7).then(|| vec![1, num_layers / 2 - 1, num_layers - 4])
}

/// The published choice of DFlash (2602.06036): `count` blocks spread evenly from the second to the
/// third-last, `round(1 + i (N - 4) / (count - 1))` with ties to even; `None` where they are not distinct.
pub fn evenly_spread(num_layers: usize, count: usize) -> Option<Vec<usize>> {
    let span = num_layers.checked_sub(4)? as f64;
    let steps = count.checked_sub(1).filter(|&steps| steps > 0)? as f64;
    let id = |index: usize| (1.0 + index as f64 * span / steps).round_ties_even() as usize;
    let ids: Vec<usize> = (0..count).map(id).collect();
    ids.windows(2).all(|pair| pair[0] < pair[1]).then_some(ids)
}

/// The blocks of a drafter: the explicit ids if there are any, else `default`.
///
/// # Errors
/// [`ModelError::Setting`] naming `drafter.<family>.aux_layer_ids` when explicit ids are not strictly
/// increasing ids of the target, or there is no default.
pub fn choose(
    family: &str,
    explicit: Option<&Vec<usize>>,
    default: Option<Vec<usize>>,
    num_layers: usize,
) -> Result<Vec<usize>, ModelError> {
    match explicit {
        Some(ids) => check(family, ids, num_layers).map(|()| ids.clone()),
        None => default.ok_or_else(|| {
            ModelError::setting(
                format!("a target of {num_layers} layers is too shallow for the layers that `{family}` reads by default"),
                format!("set `drafter.{family}.aux_layer_ids` to distinct ids below {num_layers}"),
            )
        }),
    }
}

/// Checks explicit ids: strictly increasing and inside the target.
///
/// # Errors
/// [`ModelError::Setting`] naming the list.
pub fn check(family: &str, ids: &[usize], num_layers: usize) -> Result<(), ModelError> {
    let increasing = ids.windows(2).all(|pair| pair[0] < pair[1]);
    if !ids.is_empty() && increasing && ids.iter().all(|&id| id < num_layers) {
        return Ok(());
    }
    Err(ModelError::setting(
        format!(
            "`drafter.{family}.aux_layer_ids` is {ids:?}, expected strictly increasing ids below {num_layers}"
        ),
        "ids count blocks from 0 and name the block whose output is taken",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The published lists (z-lab model cards of Qwen3-8B and Qwen3-14B) and a tie: 30 blocks, 7.5 to 8.
    #[test]
    fn the_published_lists() {
        assert_eq!(evenly_spread(36, 5).unwrap(), [1, 9, 17, 25, 33]);
        assert_eq!(evenly_spread(40, 5).unwrap(), [1, 10, 19, 28, 37]);
        assert_eq!(evenly_spread(30, 5).unwrap(), [1, 8, 14, 20, 27]);
        assert_eq!(low_middle_high(30).unwrap(), [1, 14, 26]);
    }

    #[test]
    fn shallow_targets_have_no_default() {
        assert_eq!(low_middle_high(6), None);
        assert_eq!(low_middle_high(7).unwrap(), [1, 2, 3]);
        assert_eq!(evenly_spread(7, 5), None);
        assert_eq!(evenly_spread(8, 5).unwrap(), [1, 2, 3, 4, 5]);
        assert_eq!(evenly_spread(3, 5), None);
    }
}
