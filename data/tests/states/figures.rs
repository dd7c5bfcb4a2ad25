//! The teacher's figures beside the states: what they are, and what is left of them after a crash.

use std::path::Path;

use burn::tensor::Device;
use draftsmith_data::cache::{
    CacheIdentity, CacheManifest, CaptureConfig, CaptureFigures, CaptureJob, CaptureReport, capture,
};
use draftsmith_data::hidden::{CachedSource, HiddenStateSource, OnlineSource};
use draftsmith_models::batch::{StateSpec, TokenRow};
use draftsmith_models::file;
use draftsmith_models::target::TargetModel;
use draftsmith_models::weights::host_values;

use crate::tiny;

fn open(folder: &Path, identity: &CacheIdentity) -> CachedSource {
    CachedSource::open(folder, identity, &Device::flex()).unwrap()
}

fn contents(folder: &Path) -> Vec<(String, Vec<u8>)> {
    tiny::names(folder)
        .into_iter()
        .map(|name| (name.clone(), file::read(&folder.join(name)).unwrap()))
        .collect()
}

/// Figures at one position of given logits, in f64.
fn plain(logits: &[f32], next: u32) -> (f64, f64, u32) {
    let log_z = logits.iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln();
    let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
    let log_p = f64::from(logits[next as usize]) - log_z;
    (log_z, log_p, best.unwrap() as u32)
}

#[test]
fn figures_are_those_of_the_stored_states_at_every_position_that_teaches() {
    let (folder, target) = tiny::target();
    let rows = tiny::rows(&[9, 14, 2, 30]);
    let identity = tiny::identity(folder.path());
    let states = folder.path().join("states");
    tiny::capture_all(
        &target,
        &rows,
        &identity,
        &CaptureConfig::default(),
        &states,
    );
    let some = StateSpec {
        aux_layer_ids: vec![tiny::AUX[1]],
    };
    for source in [
        open(&states, &identity),
        open(&states, &identity).select(&some).unwrap(),
    ] {
        let found = source.states(&tiny::batch(&rows)).unwrap();
        let figures = found.teacher.unwrap();
        let logits = target.ends().logits(found.final_hidden.flatten::<2>(0, 1));
        let logits = host_values(&logits);
        for (index, row) in rows.iter().enumerate() {
            assert_eq!(figures[index].len(), row.len());
            for (position, found) in figures[index].iter().enumerate() {
                let follows = row.turns.get(position + 1).is_some_and(|turn| *turn != 0);
                if !follows {
                    assert!(found.log_z.is_nan() && found.log_p_next.is_nan());
                    continue;
                }
                let start = (index * 30 + position) * tiny::VOCAB;
                let next = row.ids[position + 1];
                let (log_z, log_p, best) = plain(&logits[start..start + tiny::VOCAB], next);
                // f32 sums of 320 terms and logits up to 20: a few units of 2^-20.
                assert!(
                    (f64::from(found.log_z) - log_z).abs() < 2e-5,
                    "{found:?} {log_z}"
                );
                assert!(
                    (f64::from(found.log_p_next) - log_p).abs() < 2e-5,
                    "{found:?} {log_p}"
                );
                assert_eq!(found.argmax, best);
            }
        }
    }
    let online = OnlineSource::new(target, tiny::spec()).unwrap();
    assert!(
        online
            .states(&tiny::batch(&rows))
            .unwrap()
            .teacher
            .is_none()
    );
}

#[test]
fn a_cache_without_figures_is_read_and_completed_from_its_states() {
    let (folder, target) = tiny::target();
    let rows = tiny::many_rows(12);
    let identity = tiny::identity(folder.path());
    let config = tiny::one_row_shards();
    let clean = folder.path().join("clean");
    tiny::capture_all(&target, &rows, &identity, &config, &clean);
    let states = folder.path().join("states");
    let earlier = tiny::capture_states(&target, &rows, &identity, &config, &states);
    assert_eq!(earlier.manifest.rows_without_figures(), 12);
    let manifest = fs_err::read_to_string(states.join("manifest.json")).unwrap();
    assert!(!manifest.contains("teacher"), "{manifest}");
    let batch = tiny::batch(&rows[..3]);
    let without = open(&states, &identity).states(&batch).unwrap();
    assert!(without.teacher.is_none());

    let stopped = add_until(&target, &rows, &identity, &states, 5);
    assert!(!stopped.is_complete);
    // The fifth row was computed when the work stopped, and not written.
    assert_eq!((stopped.kept_rows, stopped.completed_rows), (12, 4));
    let source = open(&states, &identity);
    assert!(source.states(&batch).unwrap().teacher.is_some());
    let mixed = tiny::batch(&rows[3..6]);
    assert!(source.states(&mixed).unwrap().teacher.is_none());

    let report = add_until(&target, &rows, &identity, &states, usize::MAX);
    assert_eq!((report.captured_rows, report.completed_rows), (0, 8));
    let tokens: usize = rows[4..].iter().map(TokenRow::len).sum();
    assert_eq!(report.completed_tokens, tokens as u64);
    assert_eq!(contents(&states), contents(&clean));
}

/// A capture that stops when `stop_after` rows lack nothing.
fn add_until(
    target: &TargetModel,
    rows: &[TokenRow],
    identity: &CacheIdentity,
    folder: &Path,
    stop_after: usize,
) -> CaptureReport {
    let config = tiny::one_row_shards();
    let job = CaptureJob {
        identity,
        config: &config,
        folder,
        figures: CaptureFigures::Compute,
    };
    capture(target, rows, job, &mut |p| p.done_rows < stop_after).unwrap()
}

#[test]
fn damaged_figures_are_refused_and_computed_again() {
    let (folder, target) = tiny::target();
    let rows = tiny::many_rows(4);
    let identity = tiny::identity(folder.path());
    let config = tiny::one_row_shards();
    let states = folder.path().join("states");
    let report = tiny::capture_all(&target, &rows, &identity, &config, &states);
    let before = contents(&states);
    let path = states.join(&report.manifest.shards[2].teacher.as_ref().unwrap().file);
    let whole = file::read(&path).unwrap();
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    for (damaged, reason) in [
        (flipped.as_slice(), "checksum differs"),
        (&whole[..whole.len() / 2], "bytes, expected"),
    ] {
        file::write_atomic(&path, damaged).unwrap();
        fs_err::write(states.join(".teacher-00000002.arrow.1.tmp"), b"half").unwrap();
        let error = CachedSource::open(&states, &identity, &Device::flex()).unwrap_err();
        let message = error.to_string();
        assert!(message.contains("file of teacher figures"), "{message}");
        assert!(message.contains(reason), "{message}");
        let report = tiny::capture_all(&target, &rows, &identity, &config, &states);
        assert_eq!((report.captured_rows, report.completed_rows), (0, 1));
        assert_eq!(contents(&states), before);
    }
    // Figures that are gone although the manifest names them.
    fs_err::remove_file(&path).unwrap();
    assert!(CachedSource::open(&states, &identity, &Device::flex()).is_err());
    tiny::capture_all(&target, &rows, &identity, &config, &states);
    assert_eq!(contents(&states), before);
}

/// Rows whose marks changed since: a slot would be taught by a figure that nobody computed.
#[test]
fn positions_without_figures_that_a_slot_needs_are_refused() {
    let (folder, target) = tiny::target();
    let rows = tiny::rows(&[9]);
    let identity = tiny::identity(folder.path());
    let states = folder.path().join("states");
    tiny::capture_all(
        &target,
        &rows,
        &identity,
        &CaptureConfig::default(),
        &states,
    );
    let mut marked = rows[0].clone();
    marked.turns.fill(1);
    let message = open(&states, &identity)
        .states(&tiny::batch(&[marked]))
        .unwrap_err()
        .to_string();
    assert_eq!(
        message,
        "row `row-0`, position 0: the teacher's log-sum-exp holds a value that is not finite"
    );
}

#[test]
fn a_capture_without_figures_keeps_those_it_finds() {
    let (folder, target) = tiny::target();
    let rows = tiny::many_rows(3);
    let identity = tiny::identity(folder.path());
    let config = tiny::one_row_shards();
    let states = folder.path().join("states");
    tiny::capture_all(&target, &rows, &identity, &config, &states);
    let before = contents(&states);
    tiny::capture_states(&target, &rows, &identity, &config, &states);
    assert_eq!(contents(&states), before);
    let manifest = CacheManifest::read(&states).unwrap();
    assert_eq!(manifest.rows_without_figures(), 0);
}
