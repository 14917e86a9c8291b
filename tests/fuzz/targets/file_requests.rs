//! Requests that create files and track mappings. See [`fdmap_fuzz::files`].

#![no_main]

use fdmap_fuzz::files;

libfuzzer_sys::fuzz_target!(|input: files::Input| files::run(input));
