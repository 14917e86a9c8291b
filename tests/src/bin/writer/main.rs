//! A writer: writes to a file of the service in all ways that there are, on command, and logs each write. See
//! `fdmap_tests::lost`.

mod aio;
mod call;
mod descriptor;
mod direct;
mod draw;
mod remap;
mod remote;
mod stage;
mod store;

use std::io::{BufRead as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::time::Duration;

use fdmap_tests::no_lost_writes::log::Lane;
use fdmap_tests::pattern::Pattern;

use call::{Done, words_of};
use draw::Draw;
use stage::{Stage, Tools};

/// A way of writing.
trait Writer {
    /// Writes some pages, and logs them. Whatever is still under way afterwards is logged later.
    fn batch(&mut self, draw: &mut Draw, lane: &mut Lane<'_>) -> Done;

    /// Waits for what is under way.
    fn finish(&mut self, lane: &mut Lane<'_>) -> Done {
        let _ = lane;
        Ok(())
    }
}

fn main() {
    let mut stage = Stage::default();
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { return };
        if line == "return" {
            // What is dropped then is harvested and unmapped, as in any program that ends well.
            return;
        }
        let words: Vec<&str> = line.split(' ').collect();
        match perform(&mut stage, &words) {
            Ok(said) => println!("ok {said}"),
            Err(said) => println!("failed {said}"),
        }
        if std::io::stdout().flush().is_err() {
            return;
        }
    }
}

fn number<T: std::str::FromStr<Err: std::error::Error>>(word: &str) -> Done<T> {
    word.parse().map_err(|error| format!("{word}: {}", words_of(error)))
}

fn perform(stage: &mut Stage, words: &[&str]) -> Done<String> {
    let pattern = |seed: &str, percent: &str| {
        Ok::<_, String>(Pattern { seed: number(seed)?, percent: number(percent)? })
    };
    match words {
        ["log", path] => stage.log(path),
        ["map", folder, name, kind] => stage.map(folder, name, kind),
        ["drop", mapping] => stage.drop_mapping(number(mapping)?),
        ["source", path] => stage.source(path),
        ["device", path] => stage.device(path),
        ["remote", pid, address, len] => stage.remote(number(pid)?, number(address)?, number(len)?),
        ["fill", mapping, seed, percent, first, end, lane] => {
            let pattern = pattern(seed, percent)?;
            stage.fill(number(mapping)?, pattern, number(first)?, number(end)?, number(lane)?)
        }
        ["read", mapping, first, end] => stage.read(number(mapping)?, number(first)?, number(end)?),
        ["pageout", mapping] => stage.page_out(number(mapping)?),
        ["end", mapping, how] => stage.end(number(mapping)?, how),
        ["pass", seed, percent, first, end, lane] => {
            stage.pass(pattern(seed, percent)?, number(first)?, number(end)?, number(lane)?)
        }
        ["once", way, seed, first, end, lane] => {
            stage.once(way, number(seed)?, (number(first)?, number(end)?), number(lane)?)
        }
        ["hole", way, first, end, lane] => {
            stage.hole(number(way)?, number(first)?, number(end)?, number(lane)?)
        }
        ["run", millis, seed, first, end, lane, ways @ ..] => {
            let time = Duration::from_millis(number(millis)?);
            stage.run(time, number(seed)?, (number(first)?, number(end)?), number(lane)?, ways)
        }
        ["exit"] => std::process::exit(0),
        // It answers in our place, and waits for the end of its input.
        ["exec"] => {
            Err(std::process::Command::new("sh").args(["-c", "echo ok; exec cat"]).exec().to_string())
        }
        other => Err(format!("{other:?} is nothing to do")),
    }
}
