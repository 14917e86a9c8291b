//! Compiles the BPF programs with clang, and generates Rust types for the records that they share with the service.
//!
//! For each `bpf/NAME.bpf.c`, the build writes `NAME.bpf.o` and the libbpf skeleton `NAME.skel.rs` to `OUT_DIR`. The
//! service uses only module `types` of a skeleton, which libbpf-cargo derives from the BTF of the object. It does not
//! use the skeleton's loader: a loaded skeleton borrows the storage of its object, and the probes keep objects for as
//! long as the service runs.

#[cfg(not(feature = "xarray"))]
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}

#[cfg(feature = "xarray")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=bpf");
    println!("cargo::rerun-if-env-changed=CLANG");
    [
        "page_state",
        "block_walk",
        "page_pins",
        "mappers",
        "file_users",
        "file_writes",
        "space_events",
        "swap_slots",
    ]
    .into_iter()
    .try_for_each(skeleton::build)
}

#[cfg(feature = "xarray")]
mod skeleton {
    use std::env;
    use std::error::Error;
    use std::path::PathBuf;

    use libbpf_cargo::SkeletonBuilder;

    pub fn build(name: &str) -> Result<(), Box<dyn Error>> {
        let out = PathBuf::from(env::var("OUT_DIR")?);
        // libbpf-sys provides bpf_helpers.h and related headers.
        let libbpf = env::var("DEP_BPF_INCLUDE")?;
        // linux/types.h includes asm/types.h, which Debian installs in a directory for each architecture.
        let arch = env::var("CARGO_CFG_TARGET_ARCH")?;
        let clang = env::var("CLANG").unwrap_or_else(|_| "clang".to_owned());
        SkeletonBuilder::new()
            .source(format!("bpf/{name}.bpf.c"))
            .obj(out.join(format!("{name}.bpf.o")))
            .reference_obj(true)
            .clang(&clang)
            .clang_args([
                "-Wall".to_owned(),
                "-Werror".to_owned(),
                format!("-I{libbpf}"),
                format!("-I/usr/include/{arch}-linux-gnu"),
            ])
            .build_and_generate(out.join(format!("{name}.skel.rs")))
            .map_err(|error| {
                format!(
                    "{clang} bpf/{name}.bpf.c: {error:#}; install clang, or build without the xarray feature"
                )
            })?;
        Ok(())
    }
}
