//! [`TopTwo`]: the two best tokens at a position and how far they are apart.

use serde::{Deserialize, Serialize};

/// The target's two best tokens at one position.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TopTwo {
    /// The best token, which becomes text.
    pub first: u32,
    /// The runner-up.
    pub second: u32,
    /// Score of the first less that of the second: logits, or log-probabilities with their noise.
    pub gap: f32,
}

/// The two largest scores of a row with at least two entries; ties go to the smaller id. `gap` turns the two scores
/// into their distance.
pub fn top_two<T: Copy + PartialOrd>(scores: &[T], gap: impl Fn(T, T) -> f32) -> Option<TopTwo> {
    let (mut first, mut second): (Option<usize>, Option<usize>) = (None, None);
    for (index, &value) in scores.iter().enumerate() {
        if first.is_none_or(|best| value > scores[best]) {
            second = first;
            first = Some(index);
        } else if second.is_none_or(|best| value > scores[best]) {
            second = Some(index);
        }
    }
    let (first, second) = (first?, second?);
    Some(TopTwo {
        first: first as u32,
        second: second as u32,
        gap: gap(scores[first], scores[second]),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_best_are_found_in_any_order() {
        let best = top_two(&[1.0_f32, 4.0, 2.0, 3.5], |a, b| a - b).unwrap();
        assert_eq!((best.first, best.second), (1, 3));
        assert!((best.gap - 0.5).abs() < 1e-6);
        let tied = top_two(&[2.0_f32, 2.0, 1.0], |a, b| a - b).unwrap();
        assert_eq!((tied.first, tied.second), (0, 1));
        assert!(top_two(&[1.0_f32], |a, b| a - b).is_none());
    }
}
