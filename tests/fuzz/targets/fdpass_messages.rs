//! Packets on the fdpass socket. See [`fdmap_fuzz::fdpass`].

#![no_main]

use fdmap_fuzz::fdpass;

libfuzzer_sys::fuzz_target!(|input: fdpass::Input| fdpass::run(input));
