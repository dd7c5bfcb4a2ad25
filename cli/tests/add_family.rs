//! The recipe "Adding a drafter family" of `CONTRIBUTING.md`, carried out: a toy family is added to a copy of the
//! workspace by a source file, a row of the registry, a golden folder and a run file. The test suites and the
//! program of the copy then know it, although nothing else was touched.
#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where the copy gets the pieces of the family, from where in `cli/tests/toy_family`.
const PIECES: [[&str; 2]; 3] = [
    ["models/src/drafter/toy.rs", "toy.rs"],
    ["models/tests/golden/toy", "golden"],
    ["configs/toy.toml", "toy.toml"],
];
const REGISTRY: &str = "models/src/drafter/mod.rs";
/// The two lines that the registry gains, each in front of the other line.
const ROWS: [[&str; 2]; 2] = [
    ["mod token;", "pub mod toy;"],
    [
        "}\n\n/// Rotary tables",
        "    \"toy\" => Toy(toy::ToyConfig, toy::Toy),",
    ],
];
/// Folders of the workspace's root that are no part of its sources.
const OTHERS: [&str; 4] = ["target", "runs", ".git", "shared"];

/// Content by path relative to a folder.
type Tree = BTreeMap<PathBuf, Vec<u8>>;

fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// Always the same place: a second run compiles only what changed.
fn copy() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("add-family")
}

fn tree(root: &Path) -> Tree {
    let mut files = Tree::new();
    let mut open = vec![root.to_owned()];
    while let Some(folder) = open.pop() {
        for entry in fs_err::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let place = path.strip_prefix(root).unwrap().to_owned();
            let is_other = OTHERS.iter().any(|other| place == Path::new(other));
            if path.is_dir() && !is_other && !path.ends_with("__pycache__") {
                open.push(path);
            } else if path.is_file() && path.extension().is_none_or(|ending| ending != "tmp") {
                files.insert(place, fs_err::read(&path).unwrap());
            }
        }
    }
    files
}

/// The workspace with the toy family in it.
fn with_toy(mut files: Tree) -> Tree {
    let pieces = workspace().join("cli/tests/toy_family");
    for [place, piece] in PIECES {
        let piece = pieces.join(piece);
        if piece.is_file() {
            files.insert(place.into(), fs_err::read(piece).unwrap());
        } else {
            let inside = tree(&piece).into_iter();
            files.extend(inside.map(|(name, bytes)| (Path::new(place).join(name), bytes)));
        }
    }
    let registry = files.get_mut(Path::new(REGISTRY)).unwrap();
    let mut text = String::from_utf8(registry.clone()).unwrap();
    for [before, row] in ROWS {
        assert_eq!(text.matches(before).count(), 1, "{before}");
        text = text.replace(before, &format!("{row}\n{before}"));
    }
    *registry = text.into_bytes();
    files
}

/// Makes a folder hold exactly these files; those that are as they should be keep their time.
fn write(root: &Path, files: &Tree) {
    fs_err::create_dir_all(root).unwrap();
    let found = tree(root);
    for (place, _) in found
        .iter()
        .filter(|(place, _)| !files.contains_key(*place))
    {
        fs_err::remove_file(root.join(place)).unwrap();
    }
    for (place, bytes) in files {
        if found.get(place) != Some(bytes) {
            draftsmith_models::file::write_atomic(&root.join(place), bytes).unwrap();
        }
    }
}

/// Lines of `after` that `before` does not have, given that it has all others in the same order.
fn added_lines(before: &[u8], after: &[u8]) -> Vec<String> {
    let before = String::from_utf8(before.to_vec()).unwrap();
    let after = String::from_utf8(after.to_vec()).unwrap();
    let mut old = before.lines().peekable();
    let mut added = Vec::new();
    for line in after.lines() {
        if old.peek() == Some(&line) {
            old.next();
        } else {
            added.push(line.to_owned());
        }
    }
    assert_eq!(old.next(), None, "a line was taken away");
    added
}

/// Makes the copy and asserts that it differs from the workspace in the four pieces of the recipe only.
fn copied() -> PathBuf {
    let root = copy();
    let before = tree(workspace());
    write(&root, &with_toy(before.clone()));
    let after = tree(&root);
    assert!(before.keys().all(|place| after.contains_key(place)));
    for (place, bytes) in &after {
        match before.get(place) {
            Some(old) if old == bytes => (),
            Some(old) => {
                assert_eq!(place, Path::new(REGISTRY));
                assert_eq!(added_lines(old, bytes), ROWS.map(|[_, row]| row));
            }
            None => {
                let is_piece = PIECES.iter().any(|[piece, _]| place.starts_with(piece));
                assert!(is_piece, "`{}` is no piece of the recipe", place.display());
            }
        }
    }
    root
}

/// Cargo in the copy, with a build folder of its own: cargo would take the crates of the copy for ours and mix them up.
fn cargo(root: &Path, arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO"));
    let ours = std::env::vars_os().map(|(name, _)| name);
    // What cargo told this test about its own package is not true of the copy.
    for name in ours.filter(|name| name.to_string_lossy().starts_with("CARGO_")) {
        if !["CARGO_HOME", "CARGO_TERM_COLOR"].contains(&&*name.to_string_lossy()) {
            command.env_remove(name);
        }
    }
    let output = command
        .args(arguments)
        .args(["--release", "--workspace", "--locked", "--offline"])
        .current_dir(root)
        .env("CARGO_TARGET_DIR", root.join("target"))
        .output()
        .unwrap();
    let text =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    let text = text.concat();
    assert!(output.status.success(), "{text}");
    text
}

/// The pieces are all that is needed: the copy is the workspace and nothing else beside them.
#[test]
fn a_family_is_added_by_four_pieces() {
    let root = copied();
    let registry = fs_err::read_to_string(root.join(REGISTRY)).unwrap();
    assert!(registry.contains(ROWS[1][1]));
}

/// Golden, parity, alignment, leak and every other suite of the models take the toy as it is.
#[test]
#[ignore = "compiles the workspace a second time; `scripts/add_family_check.sh` runs it"]
fn every_suite_of_the_models_knows_an_added_family() {
    let root = copied();
    let text = cargo(&root, &["test", "--test", "suite"]);
    for name in [
        "alignment::pitfall_42_states_from_the_anchor_on_are_invisible",
        "alignment::pitfall_43_every_family_reads_and_predicts_what_its_table_says",
        "drafter_golden::losses_and_all_gradients_equal_the_golden",
        "parity::pitfall_44_later_steps_see_the_keys_that_serving_sees",
    ] {
        assert!(
            text.contains(&format!("test {name} ... ok")),
            "{name}: {text}"
        );
    }
}

/// The program trains, measures and refuses to export it.
#[test]
#[ignore = "compiles the workspace a second time; `scripts/add_family_check.sh` runs it"]
fn the_program_trains_and_measures_an_added_family() {
    let root = copied();
    cargo(&root, &["build", "--bin", "draftsmith"]);
    let runs = root.join("runs");
    if runs.exists() {
        fs_err::remove_dir_all(&runs).unwrap();
    }
    let run = |arguments: &[&str]| {
        let program = root.join("target/release/draftsmith");
        let output = Command::new(program)
            .args(arguments)
            .current_dir(&root)
            .output()
            .unwrap();
        let text = [output.stdout, output.stderr];
        let text = text.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        (output.status.code(), text.concat())
    };
    let layout = ["--set", r#"export.formats=["native"]"#];
    let (code, text) = run(&[&["run", "configs/toy.toml"], layout.as_slice()].concat());
    assert_eq!(code, Some(2), "{text}");
    let refusal = "the layout `native` has no place for a drafter of the family `toy`";
    assert!(text.contains(refusal), "{text}");
    assert!(!runs.exists(), "a refusal writes nothing");
    let (code, text) = run(&["run", "configs/toy.toml"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("greedy output identical: yes"), "{text}");
    let folder = runs.join("toy/toy");
    let metrics = fs_err::read_to_string(folder.join("metrics.jsonl")).unwrap();
    assert_eq!(metrics.lines().count(), 6);
    let latest = fs_err::read_to_string(folder.join("checkpoints/latest")).unwrap();
    assert_eq!(latest.trim(), "step-000006");
    let (code, text) = run(&["doctor", "configs/toy.toml"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("ok   parity of `toy`"), "{text}");
}
