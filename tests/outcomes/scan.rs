//! Finds the names of blocking calls in the library's sources.
//!
//! Whatever blocks passes `wait` or `wait_shielded` with its name as the first argument. So do
//! the functions through which it gets there: those that have a parameter `op` and hand it on as
//! the first argument. A name is the literal with which any of them is called, at once or through
//! a variable `op`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

const PARAMETER: &str = "op: &'static str";

const VARIABLE: &str = "let op = \"";

/// Functions of these names have no other meaning in the library.
const PLAIN: [&str; 3] = ["wait_shielded", "block", "block_shielded"];

/// The names, each with the files it was found in.
pub(crate) fn op_names() -> BTreeMap<String, BTreeSet<PathBuf>> {
    let mut files = Vec::new();
    collect(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut files);
    let sources: Vec<(PathBuf, String)> = files
        .into_iter()
        .map(|file| (file.clone(), code(&fs::read_to_string(file).unwrap())))
        .collect();
    let waits = waiting_functions(&sources);
    let mut names: BTreeMap<String, BTreeSet<PathBuf>> = BTreeMap::new();
    for (file, text) in &sources {
        for argument in waits.iter().flat_map(|function| first_arguments(text, function)) {
            if let Some(name) = argument.strip_prefix('"').and_then(|rest| rest.split('"').next()) {
                names.entry(name.to_owned()).or_default().insert(file.clone());
            }
        }
        for (at, _) in text.match_indices(VARIABLE) {
            let rest = &text[at + VARIABLE.len()..];
            let name = rest.split('"').next().unwrap_or_default();
            names.entry(name.to_owned()).or_default().insert(file.clone());
        }
        // A name in a variable is found above, or where that variable is a parameter.
        for argument in PLAIN.iter().flat_map(|function| first_arguments(text, function)) {
            assert!(
                argument.starts_with('"') || is_word(argument, "op"),
                "{}: a call that waits under neither a literal nor `op`: {}",
                file.display(),
                argument.lines().next().unwrap_or_default()
            );
        }
    }
    names
}

fn collect(dir: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            // The test kit blocks on processes, not through the library.
            if name != "testing" {
                collect(&path, files);
            }
        } else if name.ends_with(".rs") && !name.ends_with("tests.rs") {
            files.push(path);
        }
    }
}

/// A file without its comments and its unit tests.
fn code(text: &str) -> String {
    let text = text.split("\n#[cfg(test)]\nmod ").next().unwrap_or_default();
    text.lines().filter(|line| !line.trim_start().starts_with("//")).fold(
        String::new(),
        |mut code, line| {
            code.push_str(line);
            code.push('\n');
            code
        },
    )
}

fn waiting_functions(sources: &[(PathBuf, String)]) -> BTreeSet<String> {
    let mut waits: BTreeSet<String> =
        ["wait", "wait_shielded"].map(str::to_owned).into_iter().collect();
    let candidates: Vec<(String, &str)> =
        sources.iter().flat_map(|(_, text)| functions_with_op(text)).collect();
    loop {
        let more: Vec<String> = candidates
            .iter()
            .filter(|(name, _)| !waits.contains(name))
            .filter(|(_, body)| {
                waits.iter().any(|wait| first_arguments(body, wait).any(|arg| is_word(arg, "op")))
            })
            .map(|(name, _)| name.clone())
            .collect();
        if more.is_empty() {
            return waits;
        }
        waits.extend(more);
    }
}

/// The functions with a parameter `op` as the first one after `self`, with their bodies.
fn functions_with_op(text: &str) -> impl Iterator<Item = (String, &str)> {
    text.match_indices("fn ").filter_map(move |(at, _)| {
        let rest = &text[at + 3..];
        let name: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        let body_at = rest.find('{')?;
        let head = &rest[..body_at];
        (!name.is_empty() && head.contains(PARAMETER)).then(|| (name, braced(&rest[body_at..])))
    })
}

fn braced(text: &str) -> &str {
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => {
                depth -= 1;
                if depth == 0 {
                    return &text[..=at];
                }
            }
            _ => {}
        }
    }
    text
}

/// What stands first in the parentheses of each call of `function`.
fn first_arguments<'a>(text: &'a str, function: &str) -> impl Iterator<Item = &'a str> {
    let call = format!("{function}(");
    let starts: Vec<usize> = text.match_indices(&call).map(|(at, _)| at).collect();
    let length = call.len();
    starts.into_iter().filter_map(move |at| {
        let before = text[..at].chars().next_back();
        let defined = text[..at].ends_with("fn ");
        let whole = !before.is_some_and(|c| c.is_alphanumeric() || c == '_');
        (whole && !defined).then(|| text[at + length..].trim_start())
    })
}

fn is_word(text: &str, word: &str) -> bool {
    text.strip_prefix(word)
        .is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_'))
}
