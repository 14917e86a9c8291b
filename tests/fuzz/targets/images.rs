//! Images in CRIU's format. See [`fdmap_fuzz::images`].

#![no_main]

use fdmap_fuzz::images::{Input, run};

libfuzzer_sys::fuzz_target!(|input: Input| run(input));
