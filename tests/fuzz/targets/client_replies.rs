//! Replies of a service to the client library. See [`fdmap_fuzz::replies`].

#![no_main]

use fdmap_fuzz::replies;

libfuzzer_sys::fuzz_target!(|input: replies::Input| replies::run(input));
