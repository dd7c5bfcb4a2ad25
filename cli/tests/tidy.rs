//! House rules as tests: what each family must bring, how files look, who may depend on what.
#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use draftsmith_models::drafter::FAMILIES;

const CRATES: &[&str] = &["models", "data", "eval", "trainer", "export", "cli"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .to_owned()
}

fn text(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    fs_err::read_to_string(path).unwrap()
}

/// All files below a folder of the workspace with one of these endings; build output is left out.
fn files(folder: &str, endings: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![root().join(folder)];
    while let Some(folder) = open.pop() {
        for entry in fs_err::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() {
                if !["runs", "__pycache__"].contains(&name.as_str()) {
                    open.push(path);
                }
            } else if endings.iter().any(|ending| name.ends_with(ending)) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

fn sources() -> Vec<PathBuf> {
    CRATES
        .iter()
        .flat_map(|folder| files(folder, &[".rs"]))
        .collect()
}

#[test]
fn no_file_is_longer_than_600_lines() {
    let long: Vec<String> = sources()
        .iter()
        .map(|path| (path, text(path).lines().count()))
        .filter(|(_, lines)| *lines > 600)
        .map(|(path, lines)| format!("{}: {lines} lines", path.display()))
        .collect();
    assert!(long.is_empty(), "split by concept: {long:#?}");
}

#[test]
fn sources_and_documents_are_ascii() {
    let documents = ["docs", "configs", "scripts", ".ci"]
        .iter()
        .flat_map(|folder| files(folder, &[".md", ".toml", ".py", ".sh", "run"]));
    let top = [
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "Cargo.toml",
    ]
    .map(|name| root().join(name));
    let foreign: Vec<String> = sources()
        .into_iter()
        .chain(documents)
        .chain(top)
        .flat_map(|path| {
            let lines: Vec<String> = text(&path)
                .lines()
                .enumerate()
                .filter(|(_, line)| !line.is_ascii())
                .map(|(number, _)| format!("{}:{}", path.display(), number + 1))
                .collect();
            lines
        })
        .collect();
    assert!(foreign.is_empty(), "not ASCII: {foreign:#?}");
}

#[test]
fn each_family_has_a_golden_folder_a_run_file_and_a_row_in_the_readme() {
    let readme = text("README.md");
    let run_files: Vec<String> = files("configs", &[".toml"]).iter().map(text).collect();
    for family in FAMILIES {
        let golden = root().join("models/tests/golden").join(family);
        assert!(golden.is_dir(), "`{}` is missing", golden.display());
        let table = format!("[drafter.{family}]");
        assert!(
            run_files.iter().any(|file| file.contains(&table)),
            "no file in `configs` has `{table}`"
        );
        let row = format!("| `{family}` |");
        assert!(readme.contains(&row), "`README.md` has no row `{row} ...`");
    }
}

/// Code without its tests and comments; what remains is what can match on a name.
fn code_of(path: &Path) -> String {
    let text = text(path);
    let code = text.split("#[cfg(test)]").next().unwrap_or("");
    let lines = code
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    lines.collect::<Vec<_>>().join("\n").to_lowercase()
}

#[test]
fn no_code_outside_the_drafters_and_the_exports_names_a_family() {
    let is_home = |path: &Path| {
        let path = path.strip_prefix(root()).unwrap().to_string_lossy();
        // The configuration of a target holds foreign names, those of the head that it brings along among them.
        path.starts_with("models/src/drafter")
            || path.starts_with("export/")
            || path == "models/src/target/config.rs"
    };
    let is_source = |path: &Path| {
        let path = path.strip_prefix(root()).unwrap();
        path.components()
            .any(|component| component.as_os_str() == "src")
            && !path.ends_with("tests.rs")
    };
    let strangers: Vec<String> = sources()
        .iter()
        .filter(|path| is_source(path) && !is_home(path))
        .flat_map(|path| {
            let code = code_of(path);
            FAMILIES
                .iter()
                .filter(move |family| code.contains(*family))
                .map(|family| format!("`{}` names `{family}`", path.display()))
                .collect::<Vec<_>>()
        })
        .collect();
    assert!(strangers.is_empty(), "{strangers:#?}");
}

/// Direct dependencies of each crate; code can only use what its own manifest names.
fn dependencies() -> BTreeMap<&'static str, Vec<String>> {
    CRATES
        .iter()
        .map(|folder| {
            let manifest: toml::Table =
                toml::from_str(&text(format!("{folder}/Cargo.toml"))).unwrap();
            let tables = ["dependencies", "dev-dependencies", "build-dependencies"];
            let names = tables
                .iter()
                .filter_map(|table| manifest.get(*table)?.as_table())
                .flat_map(|table| table.keys().cloned())
                .collect();
            (*folder, names)
        })
        .collect()
}

#[test]
fn heavy_dependencies_stay_behind_their_fences() {
    let fences = [
        ("polars", "data"),
        ("arrow", "data"),
        ("tokenizers", "data"),
        ("minijinja", "data"),
        ("burn-train", "trainer"),
        ("tensorboard-rs", "trainer"),
        ("clap", "cli"),
        ("anyhow", "cli"),
        ("indicatif", "cli"),
    ];
    for (folder, names) in dependencies() {
        for (fenced, home) in fences {
            assert!(
                folder == home || !names.iter().any(|name| name == fenced),
                "`{folder}` depends on `{fenced}`, which only `{home}` may"
            );
        }
    }
}

#[test]
fn crates_use_only_crates_to_their_left() {
    let allowed: BTreeMap<&str, &[&str]> = BTreeMap::from([
        ("models", [].as_slice()),
        ("data", &["models"]),
        ("eval", &["models", "data"]),
        ("trainer", &["models", "data", "eval"]),
        ("export", &["models"]),
        ("cli", &["models", "data", "eval", "trainer", "export"]),
    ]);
    for (folder, names) in dependencies() {
        for used in names
            .iter()
            .filter_map(|name| name.strip_prefix("draftsmith-"))
        {
            assert!(
                allowed[folder].contains(&used),
                "`{folder}` may not depend on `{used}`"
            );
        }
    }
}

#[test]
fn every_crate_takes_the_lints_of_the_workspace() {
    for folder in CRATES {
        let manifest: toml::Table = toml::from_str(&text(format!("{folder}/Cargo.toml"))).unwrap();
        assert_eq!(
            manifest["lints"]["workspace"].as_bool(),
            Some(true),
            "`{folder}/Cargo.toml`"
        );
    }
}

#[test]
fn nothing_in_the_tree_names_a_path_of_one_machine() {
    let documents = ["docs", "configs", "scripts", ".ci"]
        .iter()
        .flat_map(|folder| files(folder, &[".md", ".toml", ".py", ".sh", "run"]));
    // Put together here, so that this file does not contain what it looks for.
    let forbidden: Vec<String> = ["work", "root", "home"]
        .iter()
        .map(|top| format!("/{top}/"))
        .collect();
    for path in sources().into_iter().chain(documents) {
        let text = text(&path);
        for folder in &forbidden {
            let is_absolute = text.match_indices(folder.as_str()).any(|(at, _)| {
                let before = text[..at].chars().last();
                !before.is_some_and(|c| c.is_ascii_alphanumeric() || "._-}>".contains(c))
            });
            assert!(!is_absolute, "`{}` holds `{folder}`", path.display());
        }
    }
}

#[test]
fn the_recorded_burn_version_is_the_one_in_the_lock_file() {
    let lock: toml::Table = toml::from_str(&text("Cargo.lock")).unwrap();
    let packages = lock["package"].as_array().unwrap();
    let burn = packages
        .iter()
        .find(|package| package["name"].as_str() == Some("burn"))
        .unwrap();
    let recorded = text("cli/src/provenance.rs");
    let line = format!("BURN_VERSION: &str = {}", burn["version"]);
    assert!(recorded.contains(&line), "expected `{line}`");
}
