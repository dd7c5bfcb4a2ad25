use std::collections::BTreeMap;

use draftsmith_models::drafter::DrafterConfig;

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

/// Rows of `docs/run-file.md` by section: key and default.
fn documented() -> BTreeMap<String, Vec<(String, String)>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/run-file.md");
    let text = fs_err::read_to_string(path).unwrap();
    let mut sections: BTreeMap<String, Vec<(String, String)>> = BTreeMap::new();
    let mut section = String::new();
    for line in text.lines() {
        if let Some(name) = line
            .strip_prefix("## `[")
            .and_then(|name| name.strip_suffix("]`"))
        {
            name.clone_into(&mut section);
        }
        if let Some((key, rest)) = line
            .strip_prefix("| `")
            .and_then(|row| row.split_once("` | "))
        {
            let (default, _) = rest.split_once(" | ").unwrap();
            let row = (key.to_owned(), default.trim_matches('`').to_owned());
            sections.entry(section.clone()).or_default().push(row);
        }
    }
    sections
}

/// The default of every key of a drafter's table, or of another section.
fn defaults(section: &str) -> toml::Table {
    let Some(family) = section.strip_prefix("drafter.") else {
        let file = RunFile {
            regenerate: Some(RegenerateConfig::default()),
            ..RunFile::default()
        };
        let file = toml::Table::try_from(file).unwrap();
        return file[section].as_table().unwrap().clone();
    };
    // The only key that some families need.
    let mask = ["", "mask_token = 7\n"].map(|key| key.parse::<toml::Table>().unwrap());
    let read = mask.into_iter().find_map(|table| {
        let of_family = DrafterConfig::deserialize_family(family, toml::Value::Table(table));
        of_family.ok()
    });
    let table = toml::Table::try_from(read.unwrap()).unwrap();
    table[family].as_table().unwrap().clone()
}

/// Red under: a key renamed, a default changed, or a row left out.
#[test]
fn docs_name_every_key_and_its_default() {
    let documented = documented();
    assert!(documented.contains_key("drafter.dspark"));
    let mut sections = sections();
    let families = draftsmith_models::drafter::FAMILIES.iter();
    sections.extend(families.map(|family| {
        let keys =
            fields::fields_by(|probe| DrafterConfig::deserialize_family(family, probe).map(drop));
        (format!("drafter.{family}"), keys)
    }));
    for (section, keys) in sections {
        let Some(rows) = documented.get(&section) else {
            // A family is complete without a page for its users.
            assert!(
                section.starts_with("drafter."),
                "[{section}] is not documented"
            );
            continue;
        };
        let mut names: Vec<&str> = rows.iter().map(|(key, _)| key.as_str()).collect();
        let mut keys = keys.to_vec();
        names.sort_unstable();
        keys.sort_unstable();
        assert_eq!(names, keys, "[{section}]");
        let defaults = defaults(&section);
        for (key, default) in rows {
            let value = defaults.get(key);
            match default.as_str() {
                "unset" => assert_eq!(value, None, "{section}.{key}"),
                "required" => {}
                default => {
                    let expected: toml::Table = format!("x = {default}").parse().unwrap();
                    assert_eq!(value, Some(&expected["x"]), "{section}.{key}");
                }
            }
        }
    }
}
