//! A check against a real model's data, run by hand.
//!
//! `DRAFTSMITH_MODEL` names a model folder, `DRAFTSMITH_ROWS` a conversations file and `DRAFTSMITH_IDS` the
//! exact token ids of the same rows:
//! `cargo test --release -p draftsmith-data --test text -- --ignored real_data --nocapture`

use std::path::PathBuf;

use draftsmith_data::inspect;
use draftsmith_data::prepare::{DataConfig, Texts, prepare};
use draftsmith_data::tokenizer::ChatTokenizer;

fn place(name: &str) -> PathBuf {
    std::env::var_os(name)
        .unwrap_or_else(|| panic!("`{name}` is not set"))
        .into()
}

#[test]
#[ignore = "needs a model folder and its data"]
fn real_data_prompts_equal_the_exact_ids() {
    let tokenizer = ChatTokenizer::load(&place("DRAFTSMITH_MODEL")).unwrap();
    let exact = DataConfig {
        files: vec![place("DRAFTSMITH_ROWS")],
        ids_files: vec![place("DRAFTSMITH_IDS")],
        ..DataConfig::default()
    };
    let folder = tempfile::TempDir::new().unwrap();
    let dataset = prepare(
        &exact,
        &Texts::default(),
        &tokenizer,
        &folder.path().join("exact"),
    )
    .unwrap();
    println!("{}", inspect::render_counts(&dataset));
    let coverage = inspect::coverage(&dataset, tokenizer.vocab_size()).unwrap();
    println!("{}", inspect::render_coverage(&coverage));
    assert_eq!(dataset.manifest().counts.prompt_differs, 0);

    let from_text = DataConfig {
        ids_files: Vec::new(),
        ..exact
    };
    let retokenised = prepare(
        &from_text,
        &Texts::default(),
        &tokenizer,
        &folder.path().join("text"),
    )
    .unwrap();
    println!("{}", inspect::render_counts(&retokenised));
    assert_eq!(retokenised.len(), dataset.len());
    let mut other_answers = 0;
    for index in 0..dataset.len() {
        let (exact, text) = (dataset.row(index), retokenised.row(index));
        let prompt = dataset.prompt_len(index);
        assert_eq!(
            exact.ids[..prompt],
            text.ids[..retokenised.prompt_len(index)],
            "{}",
            exact.key
        );
        let answer = |row: &draftsmith_models::batch::TokenRow| -> Vec<u32> {
            let pairs = row.ids.iter().zip(&row.turns);
            pairs
                .filter(|(_, turn)| **turn != 0)
                .map(|(id, _)| *id)
                .collect()
        };
        other_answers += usize::from(answer(&exact) != answer(&text));
    }
    println!("{other_answers} rows have other answer tokens when made from text");
}
