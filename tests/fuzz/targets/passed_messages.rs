//! Messages that other hosts and processes pass. See [`fdmap_fuzz::steps`] and [`fdmap_fuzz::passed_mappings`].

#![no_main]

use arbitrary::Arbitrary;
use fdmap_fuzz::{passed_mappings, steps};

#[derive(Arbitrary, Debug)]
enum Input {
    Steps(steps::Input),
    Mappings(passed_mappings::Input),
}

libfuzzer_sys::fuzz_target!(|input: Input| match input {
    Input::Steps(input) => steps::run(input),
    Input::Mappings(input) => passed_mappings::run(input),
});
