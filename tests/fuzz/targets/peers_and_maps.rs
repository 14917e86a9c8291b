//! Names of TLS peers, and the text of maps files. See [`fdmap_fuzz::peers`] and [`fdmap_fuzz::maps`].

#![no_main]

use arbitrary::Arbitrary;
use fdmap_fuzz::{maps, peers};

#[derive(Arbitrary, Debug)]
enum Input {
    Peers(peers::Input),
    Maps(maps::Input),
}

libfuzzer_sys::fuzz_target!(|input: Input| match input {
    Input::Peers(input) => peers::run(input),
    Input::Maps(input) => maps::run(input),
});
