//! Compiles the BPF program of the xarray probe with clang.

use std::env;
use std::error::Error;
use std::path::PathBuf;
use std::process::Command;

const SOURCE: &str = "bpf/page_state.bpf.c";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed={SOURCE}");
    println!("cargo::rerun-if-changed=bpf/page_record.h");
    println!("cargo::rerun-if-env-changed=CLANG");
    if env::var_os("CARGO_FEATURE_XARRAY").is_none() {
        return Ok(());
    }
    let object = PathBuf::from(env::var("OUT_DIR")?).join("page_state.bpf.o");
    // bpf_helpers.h and its like come with libbpf-sys.
    let libbpf = env::var("DEP_BPF_INCLUDE")?;
    // linux/types.h wants asm/types.h, which Debian keeps in a folder by architecture.
    let arch = env::var("CARGO_CFG_TARGET_ARCH")?;
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang".to_owned());
    let status = Command::new(&clang)
        .args(["-O2", "-g", "-target", "bpf", "-Wall", "-Werror", "-c", SOURCE, "-o"])
        .arg(&object)
        .arg(format!("-I{libbpf}"))
        .arg(format!("-I/usr/include/{arch}-linux-gnu"))
        .status()
        .map_err(|error| format!("{clang}: {error}; install clang, or build without the xarray feature"))?;
    if !status.success() {
        return Err(format!("{clang} could not compile {SOURCE}: {status}").into());
    }
    Ok(())
}
