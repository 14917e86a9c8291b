//! Compiles the `.proto` files without protoc.

use std::error::Error;
use std::path::PathBuf;

const FILES: [&str; 8] = [
    "fdmap/v1/types.proto",
    "fdmap/v1/files.proto",
    "fdmap/v1/pages.proto",
    "fdmap/v1/host.proto",
    "fdmap/v1/tracking.proto",
    "fdmap/v1/fdpass.proto",
    "fdmap/v1/migration.proto",
    "fdmap/v1/migration_control.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    for file in FILES {
        println!("cargo::rerun-if-changed={file}");
    }
    let descriptors = protox::compile(FILES, ["."])?;

    // Reflection serves exactly what was compiled.
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("fdmap_descriptor.bin"), prost_encode(&descriptors))?;

    let grpc = std::env::var_os("CARGO_FEATURE_GRPC").is_some();
    tonic_prost_build::configure()
        .build_client(grpc)
        .build_server(grpc)
        .build_transport(false)
        .bytes(".fdmap.v1.EntryBatch")
        .bytes(".fdmap.v1.BitmapBatch")
        .bytes(".fdmap.v1.ChangedBitmaps")
        .bytes(".fdmap.v1.MigratedPages")
        .compile_fds(descriptors)?;
    Ok(())
}

fn prost_encode(descriptors: &prost_types::FileDescriptorSet) -> Vec<u8> {
    use prost::Message as _;
    descriptors.encode_to_vec()
}
