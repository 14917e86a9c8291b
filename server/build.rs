//! Compiles the BPF programs with clang.

use std::env;
use std::error::Error;
use std::path::PathBuf;
use std::process::Command;

/// `bpf/NAME.bpf.c` becomes `NAME.bpf.o`.
const OBJECTS: [&str; 3] = ["page_state", "page_pins", "file_writes"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=bpf");
    println!("cargo::rerun-if-env-changed=CLANG");
    if env::var_os("CARGO_FEATURE_XARRAY").is_none() {
        return Ok(());
    }
    OBJECTS.iter().try_for_each(|name| compile(name))
}

fn compile(name: &str) -> Result<(), Box<dyn Error>> {
    let source = format!("bpf/{name}.bpf.c");
    let object = PathBuf::from(env::var("OUT_DIR")?).join(format!("{name}.bpf.o"));
    // bpf_helpers.h and its like come with libbpf-sys.
    let libbpf = env::var("DEP_BPF_INCLUDE")?;
    // linux/types.h wants asm/types.h, which Debian keeps in a folder by architecture.
    let arch = env::var("CARGO_CFG_TARGET_ARCH")?;
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang".to_owned());
    let status = Command::new(&clang)
        .args(["-O2", "-g", "-target", "bpf", "-Wall", "-Werror", "-c", &source, "-o"])
        .arg(&object)
        .arg(format!("-I{libbpf}"))
        .arg(format!("-I/usr/include/{arch}-linux-gnu"))
        .status()
        .map_err(|error| format!("{clang}: {error}; install clang, or build without the xarray feature"))?;
    if !status.success() {
        return Err(format!("{clang} could not compile {source}: {status}").into());
    }
    Ok(())
}
