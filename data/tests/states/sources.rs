//! Attribution of states to rows, whatever the batch.

use burn::tensor::Device;
use draftsmith_data::cache::CaptureConfig;
use draftsmith_data::hidden::{CachedSource, HiddenStateSource, OnlineSource};
use draftsmith_models::batch::{StateSpec, TargetStates, TokenRow};
use draftsmith_models::weights::host_values;
use half::bf16;

use crate::tiny;

/// The real positions of row `place`: aux `[S * K*H]`, then final `[S * H]`.
fn row_states(states: &TargetStates, place: usize, len: usize) -> Vec<f32> {
    let take = |tensor: &burn::tensor::Tensor<3>| {
        host_values(&tensor.clone().narrow(0, place, 1).narrow(1, 0, len))
    };
    let mut values = take(&states.aux);
    values.extend(take(&states.final_hidden));
    values
}

fn in_batches(source: &dyn HiddenStateSource, rows: &[TokenRow], size: usize) -> Vec<Vec<f32>> {
    let mut all = Vec::new();
    for chunk in rows.chunks(size) {
        let states = source.states(&tiny::batch(chunk)).unwrap();
        let of_row = |(place, row): (usize, &TokenRow)| row_states(&states, place, row.len());
        all.extend(chunk.iter().enumerate().map(of_row));
    }
    all
}

fn assert_close(left: &[f32], right: &[f32], key: &str) {
    assert_eq!(left.len(), right.len(), "{key}");
    for (a, b) in left.iter().zip(right) {
        // States reach about 20; batched products may add up 16 to 64 terms in another order, a few
        // units of 2^-23 each over eight blocks.
        assert!((a - b).abs() < 1e-4, "{key}: {a} {b}");
    }
}

/// Six prompts, two of which share a prefix.
fn six_rows() -> Vec<TokenRow> {
    let mut rows = tiny::rows(&[3, 17, 5, 64, 5, 2]);
    let prefix = rows[1].ids[..4].to_vec();
    rows[4].ids[..4].copy_from_slice(&prefix);
    rows
}

/// Pitfall 23: states that belong to other rows of the batch, or to an earlier call.
/// Red under: `stored_row` called with `place.saturating_sub(1)` in `cache/writer.rs`.
#[test]
fn pitfall_23_states_belong_to_their_row_whatever_the_batch() {
    let (folder, target) = tiny::target();
    let rows = six_rows();
    let online = OnlineSource::new(target.clone(), tiny::spec()).unwrap();
    let identity = tiny::identity(folder.path());
    let states = folder.path().join("states");
    let config = CaptureConfig {
        batch_tokens: 70,
        ..CaptureConfig::default()
    };
    tiny::capture_all(&target, &rows, &identity, &config, &states);
    let cached = CachedSource::open(&states, &identity, &Device::flex()).unwrap();

    let alone = in_batches(&online, &rows, 1);
    let order = [4, 0, 3, 5, 1, 2];
    let other: Vec<TokenRow> = order.iter().map(|&index| rows[index].clone()).collect();
    for _repeat in 0..2 {
        for size in [1, 4] {
            for (place, values) in in_batches(&online, &other, size).iter().enumerate() {
                assert_close(values, &alone[order[place]], &other[place].key);
            }
            for (row, values) in in_batches(&online, &rows, size).iter().enumerate() {
                assert_close(values, &alone[row], &rows[row].key);
            }
            let from_cache = in_batches(&cached, &other, size);
            for (place, values) in from_cache.iter().enumerate() {
                let expected = &alone[order[place]];
                for (a, b) in values.iter().zip(expected) {
                    // bf16 keeps 8 bits: half a unit is 2^-9 of the value; 1e-4 as above.
                    assert!(
                        (a - b).abs() <= b.abs() / 256.0 + 1e-4,
                        "{}",
                        other[place].key
                    );
                }
            }
        }
    }
}

#[test]
fn cached_states_are_the_rounded_ones_bit_for_bit() {
    let (folder, target) = tiny::target();
    let rows = tiny::rows(&[12, 12, 12]);
    let identity = tiny::identity(folder.path());
    let states = folder.path().join("states");
    tiny::capture_all(
        &target,
        &rows,
        &identity,
        &CaptureConfig::default(),
        &states,
    );
    let cached = CachedSource::open(&states, &identity, &Device::flex()).unwrap();
    // The same batch as in the capture: the same numbers before rounding.
    let online = OnlineSource::new(target, tiny::spec()).unwrap();
    let batch = tiny::batch(&rows);
    let (a, b) = (
        cached.states(&batch).unwrap(),
        online.states(&batch).unwrap(),
    );
    for (stored, computed) in [(a.aux, b.aux), (a.final_hidden, b.final_hidden)] {
        for (stored, computed) in host_values(&stored).iter().zip(host_values(&computed)) {
            assert_eq!(
                stored.to_bits(),
                bf16::from_f32(computed).to_f32().to_bits()
            );
        }
    }
}

#[test]
fn a_drafter_without_aux_states_gets_the_final_ones_alone() {
    let (folder, target) = tiny::target();
    let rows = tiny::rows(&[4, 9]);
    let mut identity = tiny::identity(folder.path());
    identity.aux_layer_ids.clear();
    let states = folder.path().join("states");
    tiny::capture_all(
        &target,
        &rows,
        &identity,
        &CaptureConfig::default(),
        &states,
    );
    let cached = CachedSource::open(&states, &identity, &Device::flex()).unwrap();
    let found = cached.states(&tiny::batch(&rows)).unwrap();
    assert_eq!(found.aux.dims(), [2, 9, 0]);
    assert_eq!(found.final_hidden.dims(), [2, 9, tiny::HIDDEN]);
}

#[test]
fn layers_that_the_target_does_not_have_are_refused() {
    let (_folder, target) = tiny::target();
    for ids in [vec![3, 1], vec![2, 2], vec![0, tiny::LAYERS]] {
        let spec = StateSpec { aux_layer_ids: ids };
        assert!(OnlineSource::new(target.clone(), spec).is_err());
    }
}

#[test]
fn marks_of_another_length_are_refused_online() {
    let (_folder, target) = tiny::target();
    let online = OnlineSource::new(target, tiny::spec()).unwrap();
    let mut rows = tiny::rows(&[34]);
    rows[0].turns.pop();
    let message = online.states(&tiny::batch(&rows)).unwrap_err().to_string();
    assert_eq!(
        message,
        "row `row-0` has 34 token ids, 33 marks and 34 states"
    );
}

/// A drafter that reads some of the stored blocks, or none, shares the states of one that reads them all.
/// Red under: `place * hidden` replaced by `0` in `CachedSource::selected`.
#[test]
fn some_of_the_stored_blocks_can_be_read_alone() {
    let (folder, target) = tiny::target();
    let rows = tiny::rows(&[12, 9]);
    let identity = tiny::identity(folder.path());
    let states = folder.path().join("states");
    let config = CaptureConfig::default();
    tiny::capture_all(&target, &rows, &identity, &config, &states);
    let open = || CachedSource::open(&states, &identity, &Device::flex()).unwrap();
    let all = open();
    let batch = tiny::batch(&rows);
    let whole = all.states(&batch).unwrap();
    let [num_rows, len, width] = whole.aux.dims();
    let stored = all.spec().aux_layer_ids.clone();
    let hidden = width / stored.len();
    for (place, &id) in stored.iter().enumerate() {
        let wanted = StateSpec {
            aux_layer_ids: vec![id],
        };
        let one = open().select(&wanted).unwrap();
        assert_eq!(one.spec(), &wanted);
        let found = one.states(&batch).unwrap();
        let expected = whole.aux.clone().narrow(2, place * hidden, hidden);
        assert_eq!(host_values(&found.aux), host_values(&expected));
        assert_eq!(
            host_values(&found.final_hidden),
            host_values(&whole.final_hidden)
        );
    }
    let none = StateSpec {
        aux_layer_ids: Vec::new(),
    };
    let found = open().select(&none).unwrap().states(&batch).unwrap();
    assert_eq!(found.aux.dims(), [num_rows, len, 0]);
    let other = StateSpec {
        aux_layer_ids: vec![stored[0], 77],
    };
    let message = open().select(&other).unwrap_err().to_string();
    assert!(message.contains("77"), "{message}");
}
