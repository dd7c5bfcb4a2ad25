//! What a cache refuses to give.

use std::path::Path;

use burn::tensor::Device;
use draftsmith_data::cache::{CacheIdentity, CacheManifest, CaptureConfig};
use draftsmith_data::hidden::{CachedSource, HiddenStateSource, OnlineSource};
use draftsmith_models::batch::TokenRow;
use draftsmith_models::error::Diagnose;
use draftsmith_models::file;
use draftsmith_models::fingerprint::target_fingerprint;
use draftsmith_models::weights::host_values;
use half::bf16;

use crate::tiny;

fn refusal(source: &CachedSource, rows: &[TokenRow]) -> String {
    source.states(&tiny::batch(rows)).unwrap_err().to_string()
}

/// Pitfall 24: a row with another number of states than tokens, or with states of other tokens.
/// Red under: the comparison with `ids_hash` removed.
#[test]
fn pitfall_24_lengths_and_ids_must_agree() {
    let (folder, target) = tiny::target();
    let identity = tiny::identity(folder.path());
    let states = folder.path().join("states");
    let captured = tiny::rows(&[33, 34]);
    tiny::capture_all(
        &target,
        &captured,
        &identity,
        &CaptureConfig::default(),
        &states,
    );
    let source = CachedSource::open(&states, &identity, &Device::flex()).unwrap();

    let mut longer = captured[0].clone();
    longer.ids.push(7);
    longer.turns.push(1);
    assert_eq!(
        refusal(&source, &[longer]),
        "row `row-0` has 34 token ids, 34 marks and 33 states"
    );
    let mut shorter = captured[1].clone();
    shorter.ids.pop();
    shorter.turns.pop();
    assert_eq!(
        refusal(&source, &[shorter]),
        "row `row-1` has 33 token ids, 33 marks and 34 states"
    );
    let mut unmarked = captured[1].clone();
    unmarked.turns.pop();
    assert_eq!(
        refusal(&source, &[unmarked]),
        "row `row-1` has 34 token ids, 33 marks and 34 states"
    );
    let mut other = captured[1].clone();
    other.ids[20] += 1;
    assert!(refusal(&source, &[other]).contains("captured from other token ids"));
    let mut unknown = captured[1].clone();
    unknown.key = "row-2".to_owned();
    assert!(refusal(&source, &[unknown]).contains("row `row-2` is not in the state cache"));
}

/// Overwrites the final hidden states of `row` in the only shard, from position `position` on, and
/// mends the checksum: damage that happened before the checksum was taken.
fn patch_final(folder: &Path, computed: &[f32], position: usize, states: &[Vec<bf16>]) {
    let mut manifest = CacheManifest::read(folder).unwrap();
    let path = folder.join(&manifest.shards[0].file);
    let mut content = file::read(&path).unwrap();
    let bytes = |values: &mut dyn Iterator<Item = bf16>| -> Vec<u8> {
        values.flat_map(bf16::to_le_bytes).collect()
    };
    let stored = bytes(&mut computed.iter().map(|&v| bf16::from_f32(v)));
    let start = content
        .windows(stored.len())
        .position(|w| w == stored)
        .unwrap();
    let start = start + position * tiny::HIDDEN * 2;
    let new = bytes(&mut states.iter().flatten().copied());
    content[start..start + new.len()].copy_from_slice(&new);
    file::write_atomic(&path, &content).unwrap();
    manifest.shards[0].blake3 = blake3::hash(&content).to_hex().to_string();
    manifest.write(folder).unwrap();
}

/// Pitfall 25: states that are not finite reached the training unseen.
/// Red under: `is_finite &=` replaced by `is_finite |=` in `scan`.
#[test]
fn pitfall_25_states_that_are_not_finite_are_refused_and_zeros_are_counted() {
    let (folder, target) = tiny::target();
    let identity = tiny::identity(folder.path());
    let rows = tiny::rows(&[9]);
    let online = OnlineSource::new(target.clone(), tiny::spec()).unwrap();
    let computed = online.states(&tiny::batch(&rows)).unwrap().final_hidden;
    let computed = host_values(&computed);
    let width = tiny::HIDDEN;
    let patched = |name: &str, position: usize, states: &[Vec<bf16>]| {
        let states_folder = folder.path().join(name);
        let config = CaptureConfig::default();
        tiny::capture_all(&target, &rows, &identity, &config, &states_folder);
        patch_final(&states_folder, &computed, position, states);
        CachedSource::open(&states_folder, &identity, &Device::flex()).unwrap()
    };
    let one = |value: f32| {
        let mut state = vec![bf16::from_f32(1.0); width];
        state[3] = bf16::from_f32(value);
        vec![state]
    };
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let source = patched(&format!("{value}"), 5, &one(value));
        assert_eq!(
            refusal(&source, &rows),
            "row `row-0`, position 5: the final hidden state holds a value that is not finite"
        );
    }
    let zeros = vec![vec![bf16::from_f32(-0.0); width]; 2];
    let source = patched("zeros", 2, &zeros);
    source.states(&tiny::batch(&rows)).unwrap();
    assert_eq!(source.num_zero_positions(), 2);
    let constant = patched("constant", 0, &one(1.0));
    constant.states(&tiny::batch(&rows)).unwrap();
    assert_eq!(constant.num_zero_positions(), 0);
}

/// Pitfall 27: a cache made with another target, layer set, tokenizer, template, length or type.
/// Red under: `CacheManifest::require` returning `Ok(())`.
#[test]
#[expect(clippy::too_many_lines, reason = "one line a field of the identity")]
fn pitfall_27_a_cache_of_another_target_is_refused_naming_the_field() {
    let (folder, target) = tiny::target();
    let identity = tiny::identity(folder.path());
    let states = folder.path().join("states");
    let config = CaptureConfig::default();
    tiny::capture_all(&target, &tiny::rows(&[5, 8]), &identity, &config, &states);

    let other_folder = tempfile::tempdir().unwrap();
    tiny::write_target(other_folder.path(), 2);
    let changed = |change: &dyn Fn(&mut CacheIdentity)| {
        let mut identity = identity.clone();
        change(&mut identity);
        identity
    };
    let cases = [
        (
            "target_fingerprint",
            changed(&|i| {
                i.target_fingerprint = target_fingerprint(other_folder.path()).unwrap();
            }),
        ),
        (
            "aux_layer_ids",
            changed(&|i| i.aux_layer_ids = vec![3, 1, 4]),
        ),
        (
            "tokenizer_blake3",
            changed(&|i| i.tokenizer_blake3 = "merged".to_owned()),
        ),
        (
            "template",
            changed(&|i| i.template.blake3 = "changed".to_owned()),
        ),
        (
            "template",
            changed(&|i| {
                i.template
                    .options
                    .insert("enable_thinking".to_owned(), false.into());
            }),
        ),
        ("max_len", changed(&|i| i.max_len = 64)),
        (
            "compute_dtype",
            changed(&|i| i.compute_dtype = "BF16".to_owned()),
        ),
        (
            "dataset_blake3",
            changed(&|i| i.dataset_blake3 = "other".to_owned()),
        ),
        ("hidden_size", changed(&|i| i.hidden_size = 32)),
    ];
    for (field, expected) in cases {
        let error = CachedSource::open(&states, &expected, &Device::flex()).unwrap_err();
        let message = error.to_string();
        assert!(
            message.contains(&format!("another `{field}`: expected")),
            "{message}"
        );
        assert!(error.hint().unwrap().contains("draftsmith capture"));
        assert!(error.is_user_error());
    }
    let moved = folder.path().join("moved");
    fs_err::rename(&states, &moved).unwrap();
    CachedSource::open(&moved, &identity, &Device::flex()).unwrap();
}

#[test]
fn the_refusal_of_another_layer_set_reads_as_a_sentence() {
    let (folder, target) = tiny::target();
    let identity = tiny::identity(folder.path());
    let states = folder.path().join("states");
    let config = CaptureConfig::default();
    tiny::capture_all(&target, &tiny::rows(&[5]), &identity, &config, &states);
    let mut other = identity.clone();
    other.aux_layer_ids = vec![2, 4, 5];
    let message = CachedSource::open(&states, &other, &Device::flex())
        .unwrap_err()
        .to_string();
    let message = message.replace(&states.display().to_string(), "states");
    assert_eq!(
        message,
        "the states in `states` belong to another `aux_layer_ids`: expected [2, 4, 5], found [1, 3, 4]"
    );
}

#[test]
fn a_damaged_or_incomplete_cache_is_refused() {
    let (folder, target) = tiny::target();
    let identity = tiny::identity(folder.path());
    let states = folder.path().join("states");
    let config = tiny::one_row_shards();
    tiny::capture_all(
        &target,
        &tiny::rows(&[5, 8, 6]),
        &identity,
        &config,
        &states,
    );
    let open = || CachedSource::open(&states, &identity, &Device::flex());
    let manifest = CacheManifest::read(&states).unwrap();
    let path = states.join(&manifest.shards[1].file);
    let whole = file::read(&path).unwrap();

    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    file::write_atomic(&path, &flipped).unwrap();
    assert!(open().unwrap_err().to_string().contains("checksum differs"));
    file::write_atomic(&path, &whole[..whole.len() / 2]).unwrap();
    assert!(open().unwrap_err().to_string().contains("bytes, expected"));
    file::write_atomic(&path, &whole).unwrap();
    open().unwrap();

    let mut partial = manifest.clone();
    partial.shards.remove(1);
    partial.write(&states).unwrap();
    assert!(
        open()
            .unwrap_err()
            .to_string()
            .contains("holds 2 of 3 rows")
    );
    let mut newer = manifest;
    newer.format_version = 2;
    newer.write(&states).unwrap();
    assert!(
        open()
            .unwrap_err()
            .to_string()
            .contains("format version 2, expected 1")
    );
}
