//! The documents agree with the code: their lists are compared with the definitions in the programs, the `.proto`
//! files and the Makefile. Needs no root.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use fdmap_tests::service::program;
use fdmap_tests::test;
use prost::Message as _;
use prost_types::FileDescriptorSet;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// A file of the repository.
#[track_caller]
fn text(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The Markdown files that git tracks, with their texts.
fn documents() -> Vec<(PathBuf, String)> {
    let listed = Command::new("git").args(["ls-files", "*.md"]).current_dir(root()).output().unwrap();
    assert!(listed.status.success(), "git ls-files: {}", listed.status);
    let paths: Vec<_> = String::from_utf8(listed.stdout).unwrap().lines().map(PathBuf::from).collect();
    assert!(paths.len() > 10, "{paths:?}");
    paths.into_iter().map(|path| (path.clone(), text(path.to_str().unwrap()))).collect()
}

/// The standard output of a program of the workspace, whatever its exit code is.
fn output(name: &str, arguments: &[&str]) -> String {
    let output = Command::new(program(name).unwrap()).args(arguments).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// The words of `text` that begin with `prefix` and continue with letters, digits, `-` and `_`.
fn words(text: &str, prefix: &str) -> BTreeSet<String> {
    let is_word_char = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    text.split(|c| !is_word_char(c)).filter(|word| word.starts_with(prefix)).map(str::to_owned).collect()
}

/// The first cells of the rows of the table below `heading`, without backticks, and the other cells.
#[track_caller]
fn table(document: &str, heading: &str) -> Vec<(String, String)> {
    let (_, rest) = document.split_once(heading).unwrap_or_else(|| panic!("no {heading:?}"));
    let rows =
        rest.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
    let cells = rows.skip(2).filter_map(|row| row[1..].split_once('|'));
    cells.map(|(first, rest)| (first.trim().replace('`', ""), rest.trim().replace('`', ""))).collect()
}

fn first_cells(table: &[(String, String)]) -> BTreeSet<String> {
    table.iter().map(|(first, _)| first.clone()).collect()
}

fn descriptors() -> FileDescriptorSet {
    FileDescriptorSet::decode(fdmap_proto::FILE_DESCRIPTOR_SET).unwrap()
}

#[test]
fn wire_formats_lists_every_service_and_method() {
    let rows = table(&text("docs/wire-formats.md"), "\n## gRPC\n");
    let services: Vec<_> = descriptors().file.into_iter().flat_map(|file| file.service).collect();
    assert!(services.len() >= 4);
    for service in services {
        let name = format!("fdmap.v1.{}", service.name());
        let (_, listed) =
            rows.iter().find(|(first, _)| *first == name).unwrap_or_else(|| panic!("no {name}"));
        let listed: Vec<_> = listed.trim_end_matches('|').trim().split(", ").collect();
        let methods: Vec<_> = service.method.iter().map(prost_types::MethodDescriptorProto::name).collect();
        assert_eq!(listed, methods, "{name}");
    }
}

#[test]
fn wire_formats_lists_every_fdpass_operation() {
    let rows = table(&text("docs/wire-formats.md"), "\n## The fdpass protocol\n");
    let listed: BTreeSet<_> =
        rows.iter().map(|(first, _)| first.split(',').next().unwrap().to_owned()).collect();
    let messages: Vec<_> = descriptors().file.into_iter().flat_map(|file| file.message_type).collect();
    let request = messages.iter().find(|message| message.name() == "FdpassRequest").unwrap();
    let operations: BTreeSet<_> = request
        .field
        .iter()
        .map(|field| field.type_name().rsplit('.').next().unwrap().trim_end_matches("Request").to_owned())
        .collect();
    assert_eq!(listed, operations);
}

#[test]
fn wire_formats_lists_every_limit_with_its_default() {
    let help = output("fdmapd", &["--help"]);
    let (_, limits) = help.split_once("\nLimits:\n").expect("fdmapd --help has limits");
    // A default may be on two lines.
    let limits = &limits.split_whitespace().collect::<Vec<_>>().join(" ");
    let rows = table(&text("docs/wire-formats.md"), "\nOptions of `fdmapd` set the limits");
    let options: BTreeSet<_> =
        words(limits, "--max-").into_iter().filter(|word| limits.contains(&format!("{word} <"))).collect();
    assert_eq!(first_cells(&rows), options);
    for (option, default) in rows {
        let (_, described) = limits.split_once(&format!("{option} <")).unwrap();
        let (_, value) = described.split_once("[default: ").unwrap();
        let value = value.split(']').next().unwrap();
        assert_eq!(default.split([' ', '|']).next(), Some(value), "{option}");
    }
}

#[test]
fn kernel_support_lists_every_capability() {
    let checked = output("fdmapd", &["--check"]);
    let found =
        checked.lines().filter(|line| !line.starts_with(' ')).filter_map(|line| line.split(' ').next());
    let found: BTreeSet<_> = found.map(str::to_owned).collect();
    let rows = table(&text("docs/kernel-support.md"), "\n## Capabilities\n");
    assert_eq!(first_cells(&rows), found);
}

#[test]
fn commands_in_the_documents_exist_and_all_commands_are_documented() {
    let help = output("fdmap", &["--help"]);
    let (_, commands) = help.split_once("\nCommands:\n").expect("fdmap --help has commands");
    let defined: BTreeSet<_> = commands
        .lines()
        .take_while(|line| !line.is_empty())
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|command| *command != "help")
        .map(str::to_owned)
        .collect();
    assert!(defined.len() > 20, "{defined:?}");
    let mut documented = BTreeSet::new();
    for (path, text) in documents() {
        for (command, arguments) in commands_in(&text) {
            assert!(defined.contains(&command), "{}: fdmap {command}", path.display());
            // `fdmap cursor` has subcommands.
            let help = if command == "cursor" {
                String::new()
            } else {
                output("fdmap", &[command.as_str(), "--help"])
            };
            for option in words(&arguments, "--").iter().filter(|option| option.len() > 2 && !help.is_empty())
            {
                assert!(help.contains(option), "{}: fdmap {command} {option}", path.display());
            }
            documented.insert(command);
        }
    }
    let missing: Vec<_> = defined.difference(&documented).collect();
    assert!(missing.is_empty(), "not documented: {missing:?}");
}

/// The commands `fdmap COMMAND` in the literals of a document, each with its own arguments.
fn commands_in(document: &str) -> Vec<(String, String)> {
    let mut commands = Vec::new();
    for line in literals(document).lines() {
        for part in line.split("fdmap ").skip(1) {
            let command: String = part.chars().take_while(|c| c.is_ascii_lowercase() || *c == '-').collect();
            if !command.is_empty() && !command.starts_with('-') {
                let arguments = part[command.len()..].split(" -- ").next().unwrap_or_default();
                commands.push((command, arguments.split(['#', '|', '&', ';']).next().unwrap().to_owned()));
            }
        }
    }
    commands
}

/// The text between backticks and in indented blocks of a document.
fn literals(document: &str) -> String {
    let mut literal = String::new();
    for line in document.lines() {
        match line.strip_prefix("    ") {
            Some(code) => literal.push_str(code),
            None => line.split('`').skip(1).step_by(2).for_each(|code| {
                literal.push_str(code);
                literal.push('\n');
            }),
        }
        literal.push('\n');
    }
    literal
}

#[test]
fn make_targets_in_the_documents_exist() {
    let makefile = text("Makefile");
    let targets: BTreeSet<_> = makefile
        .lines()
        .filter_map(|line| line.split_once(':'))
        .filter(|(target, _)| {
            target.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
        })
        .map(|(target, _)| target.to_owned())
        .collect();
    for (path, text) in documents() {
        let literal = literals(&text);
        for line in literal.lines() {
            for command in line
                .split("&&")
                .filter_map(|part| part.trim().trim_start_matches("sudo ").strip_prefix("make "))
            {
                let target = command.split_whitespace().find(|word| !word.contains('=')).unwrap_or_default();
                assert!(targets.contains(target), "{}: make {target}", path.display());
            }
        }
    }
    let contributing = text("CONTRIBUTING.md");
    for tier in ["check", "e2e", "e2e-guest", "fuzz", "soak", "test"] {
        assert!(targets.contains(tier) && contributing.contains(&format!("`make {tier}")), "make {tier}");
    }
}

/// A filter that selects no test makes `cargo test` succeed without running one.
#[test]
fn test_filters_in_the_documents_select_tests() {
    let mut filters = BTreeSet::new();
    for (_, document) in documents() {
        for line in document.lines() {
            let Some((_, command)) = line.split_once("cargo test ") else { continue };
            let command = command.split(['#', '`']).next().unwrap();
            let mut words =
                command.split_once(" -- ").map_or(command, |(before, _)| before).split_whitespace();
            while let Some(word) = words.next() {
                match word {
                    "-p" | "--package" | "--test" => drop(words.next()),
                    flag if flag.starts_with("--") => {}
                    filter => drop(filters.insert(filter.to_owned())),
                }
            }
        }
    }
    assert!(filters.len() > 2, "{filters:?}");
    for filter in filters {
        let function = format!("fn [a-z0-9_]*{filter}[a-z0-9_]*\\(");
        let found =
            Command::new("git").args(["grep", "-qE", &function, "--", "*.rs"]).current_dir(root()).status();
        assert!(found.unwrap().success(), "no test has {filter:?} in its name");
    }
}

/// The names of all tests of the repository.
fn test_names() -> BTreeSet<String> {
    let listed = Command::new("git").args(["ls-files", "*.rs"]).current_dir(root()).output().unwrap();
    let mut names = BTreeSet::new();
    for path in String::from_utf8(listed.stdout).unwrap().lines() {
        let mut is_test = false;
        for line in text(path).lines().map(str::trim) {
            is_test |= line.strip_prefix("#[").is_some_and(|attribute| {
                attribute.starts_with("test") || attribute.starts_with("tokio::test")
            });
            if let Some(function) = line.strip_prefix("async ").unwrap_or(line).strip_prefix("fn ")
                && std::mem::take(&mut is_test)
            {
                names.extend(function.split_once('(').map(|(name, _)| name.to_owned()));
            }
        }
    }
    assert!(names.len() > 1000, "{} tests", names.len());
    names
}

/// Asserts that a list names at least one test, and none that does not exist. Between two backticks is one name.
#[track_caller]
fn assert_cites(list: &str, tests: &BTreeSet<String>, promise: &str) {
    let cited: Vec<_> = list.split('`').skip(1).step_by(2).collect();
    assert!(!cited.is_empty(), "no test: {promise}");
    let unknown: Vec<_> = cited.iter().filter(|name| !tests.contains(**name)).collect();
    assert!(unknown.is_empty(), "no tests {unknown:?}: {promise}");
}

/// Asserts this of the last cell of each row below the head of a table.
#[track_caller]
fn assert_rows_cite(rows: &str, tests: &BTreeSet<String>) {
    for row in rows.lines().skip(2) {
        let (_, cited) = row.trim_end_matches('|').rsplit_once('|').unwrap();
        assert_cites(cited, tests, row);
    }
}

/// The paragraphs, lists and tables of a section and its subsections.
#[track_caller]
fn blocks<'a>(document: &'a str, heading: &str) -> Vec<&'a str> {
    let (_, rest) = document.split_once(heading).unwrap_or_else(|| panic!("no {heading:?}"));
    let section = rest.split("\n## ").next().unwrap();
    section
        .split("\n\n")
        .map(str::trim)
        .filter(|block| !block.is_empty() && !block.starts_with('#'))
        .collect()
}

/// The threat model names the tests that show its promises.
#[test]
fn every_action_of_a_hostile_client_has_a_test() {
    let (document, tests) = (text("docs/threat-model.md"), test_names());
    let all = blocks(&document, "\n## Actions of a hostile client\n");
    let table = all.iter().find(|block| block.starts_with('|')).unwrap();
    assert!(table.lines().count() > 40, "{table}");
    assert_rows_cite(table, &tests);
}

/// The tests that a paragraph or an item of a list names at its end.
fn cited_list(paragraph: &str) -> Option<&str> {
    ["Test: ", "Tests: "].iter().find_map(|word| paragraph.split_once(word)).map(|(_, list)| list)
}

/// Those of paragraphs, of items of lists and of rows of tables. A paragraph that ends with a colon introduces a list or a table.
#[test]
fn every_promise_of_the_threat_model_has_a_test() {
    // No test shows that something is in no message at all.
    const UNTESTED: &str = "Kernel addresses are in";
    let (document, tests) = (text("docs/threat-model.md"), test_names());
    let sections = ["### TLS", "## Rights", "## Protection of clients", "## Impact of a compromised service"];
    let mut promises = 0;
    for block in sections.iter().flat_map(|heading| blocks(&document, &format!("\n{heading}\n"))) {
        if block.starts_with('|') {
            assert_rows_cite(block, &tests);
        } else if !block.ends_with(':') && !block.starts_with(UNTESTED) {
            for promise in block.split("\n- ") {
                assert!(cited_list(promise).is_some(), "no test: {promise}");
                promises += 1;
            }
        }
    }
    assert!(promises > 20, "{promises}");
    for paragraph in document.split("\n\n").flat_map(|block| block.split("\n- ")) {
        if let Some(list) = cited_list(paragraph) {
            assert_cites(list, &tests, paragraph);
        }
    }
}

#[test]
fn environment_variables_are_documented_and_exist() {
    let grep = |pattern: &str, paths: &[&str]| {
        let mut arguments = vec!["grep", "-hE", pattern, "--"];
        arguments.extend(paths);
        let output = Command::new("git").args(arguments).current_dir(root()).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let in_programs =
        words(&grep(r#""FDMAPD?_[A-Z_]+""#, &["client/src", "shim/src", "server/src/main.rs"]), "FDMAP");
    let in_documents: BTreeSet<_> = documents().iter().flat_map(|(_, text)| words(text, "FDMAP")).collect();
    // Set by `fdmap adopt` for the process that it starts: no user sets it.
    let internal = BTreeSet::from(["FDMAP_ADOPT_FOR".to_owned()]);
    let missing: Vec<_> =
        in_programs.difference(&in_documents).filter(|name| !internal.contains(*name)).collect();
    assert!(missing.is_empty(), "not documented: {missing:?}");
    let anywhere = grep("FDMAPD?_", &["*.rs", "Makefile", ".ci", "tests/fuzz/run", "*.py"]);
    let known = words(&anywhere, "FDMAP");
    // FDMAPSNP is the magic number of a shared snapshot.
    let named = in_documents.iter().filter(|name| name.contains('_'));
    let unknown: Vec<_> = named.filter(|name| !known.contains(*name)).collect();
    assert!(unknown.is_empty(), "no such variables: {unknown:?}");
}

#[test]
fn links_and_paths_resolve() {
    const TOP: [&str; 9] =
        ["proto/", "sys/", "server/", "client/", "shim/", "tests/", "benches/", "examples/", "docs/"];
    for (path, text) in documents() {
        let folder = root().join(&path);
        let folder = folder.parent().unwrap();
        for (_, link) in text.match_indices("](").map(|(at, found)| text.split_at(at + found.len())) {
            let target = link.split(')').next().unwrap().split('#').next().unwrap();
            let local = !target.is_empty() && !target.contains("://");
            assert!(!local || folder.join(target).exists(), "{}: link to {target}", path.display());
        }
        for literal in text.split('`').skip(1).step_by(2).filter(|code| !code.contains([' ', '\n', '*', '<']))
        {
            // An upper-case component such as TARGET is a placeholder.
            let placeholder = |part: &str| !part.is_empty() && part.chars().all(|c| c.is_ascii_uppercase());
            let is_path =
                TOP.iter().any(|top| literal.starts_with(top)) && !literal.split('/').any(placeholder);
            assert!(!is_path || root().join(literal).exists(), "{}: `{literal}`", path.display());
        }
    }
}

#[test]
fn lines_wrap_at_100_columns() {
    for (path, text) in documents() {
        let mut fenced = false;
        for (number, line) in text.lines().enumerate() {
            fenced ^= line.starts_with("```");
            let exempt =
                fenced || line.starts_with('|') || line.starts_with("    ") || line.contains("](http");
            let columns = line.chars().count();
            assert!(exempt || columns <= 100, "{}:{}: {columns} columns", path.display(), number + 1);
        }
    }
}

#[test]
fn every_package_has_a_license() {
    let mut manifests = vec!["Cargo.toml".to_owned(), "tests/fuzz/Cargo.toml".to_owned()];
    for member in ["proto", "sys", "server", "client", "shim", "tests", "tests/macros", "benches"] {
        manifests.push(format!("{member}/Cargo.toml"));
    }
    for path in manifests {
        let manifest = text(&path);
        let has = ["license = \"MIT OR Apache-2.0\"", "license.workspace = true"];
        assert!(has.iter().any(|license| manifest.contains(license)), "{path}");
    }
    for source in std::fs::read_dir(root().join("server/bpf")).unwrap() {
        let path = source.unwrap().path();
        let first = std::fs::read_to_string(&path).unwrap();
        assert!(first.contains("SPDX-License-Identifier: (GPL-2.0-only OR MIT)"), "{}", path.display());
    }
}
