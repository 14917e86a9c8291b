//! Packets on the hand-over socket: see [`fdmap_fuzz::handover`].

#![no_main]

use fdmap_fuzz::handover;

libfuzzer_sys::fuzz_target!(|input: handover::Input| handover::run(input));
