//! Requests about page states. See [`fdmap_fuzz::scan`].

#![no_main]

use fdmap_fuzz::scan;

libfuzzer_sys::fuzz_target!(|input: scan::Input| scan::run(input));
