use super::*;

fn configs() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs");
    let mut paths: Vec<PathBuf> = fs_err::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    paths.sort();
    paths
}

fn read(text: &str, overrides: &[&str]) -> Result<RunFile, CliError> {
    let overrides: Vec<String> = overrides.iter().map(|typed| (*typed).to_owned()).collect();
    RunFile::read("x.toml".to_owned(), text.to_owned(), &overrides)
}

const MINIMAL: &str =
    "[target]\npath = \"t\"\n\n[data]\nfiles = [\"d.jsonl\"]\n\n[drafter.eagle3]\n";

#[test]
fn every_shipped_run_file_parses_validates_and_survives_its_resolved_form() {
    let paths = configs();
    assert!(paths.len() >= 4, "{paths:?}");
    for path in paths {
        let text = fs_err::read_to_string(&path).unwrap();
        let run_file = RunFile::read(path.display().to_string(), text, &[])
            .unwrap_or_else(|error| panic!("{error}"));
        let resolved = run_file.to_toml().unwrap();
        let again = RunFile::read("resolved.toml".to_owned(), resolved, &[]).unwrap();
        assert_eq!(run_file, again, "{}", path.display());
    }
}

#[test]
fn a_drafter_table_of_its_own_replaces_the_common_one_whole() {
    let text = format!(
        "{MINIMAL}[drafter.eagle3.train]\nepochs = 3\n\n[train]\nepochs = 2\nbatch_tokens = 99\n"
    );
    let run_file = read(&text, &[]).unwrap();
    let train = run_file.train_of(&run_file.drafter.0[0]);
    assert_eq!(train.epochs, 3);
    assert_eq!(train.batch_tokens, TrainConfig::default().batch_tokens);
}

#[test]
fn overrides_reach_existing_and_new_keys() {
    let run_file = read(
        MINIMAL,
        &[
            "train.epochs=5",
            "drafter.eagle3.draft_vocab=12",
            "run.out=some where",
        ],
    )
    .unwrap();
    assert_eq!(run_file.train.epochs, 5);
    assert_eq!(run_file.drafter.0[0].draft_vocab, DraftVocab::Size(12));
    assert_eq!(run_file.run.out, PathBuf::from("some where"));
}

#[test]
fn regeneration_is_on_exactly_when_its_table_is_there() {
    assert!(read(MINIMAL, &[]).unwrap().regenerate.is_none());
    let text = format!("{MINIMAL}[regenerate]\n");
    assert!(read(&text, &[]).unwrap().regenerate.is_some());
}

#[test]
fn a_draft_vocabulary_is_a_positive_size_or_full() {
    for (value, fits) in [
        ("\"full\"", true),
        ("7", true),
        ("0", false),
        ("-1", false),
        ("\"all\"", false),
    ] {
        let typed = format!("drafter.eagle3.draft_vocab={value}");
        assert_eq!(read(MINIMAL, &[&typed]).is_ok(), fits, "{value}");
    }
}
