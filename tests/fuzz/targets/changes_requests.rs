//! Requests about written pages. See [`fdmap_fuzz::changes`].

#![no_main]

use fdmap_fuzz::changes;

libfuzzer_sys::fuzz_target!(|input: changes::Input| changes::run(input));
