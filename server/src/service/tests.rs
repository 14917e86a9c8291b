use std::time::Instant;

use fdmap_proto::convert::FileName;
use fdmap_proto::file::{Backing, Seals};

use super::*;
use crate::files::{Caller, FileSpec};
use crate::probe::SyscallsProbe;

fn service() -> Arc<Service> {
    let host = HostCapabilities {
        capabilities: Vec::new(),
        page_size: PageSize::new(4096).unwrap(),
        hugetlb_page_sizes: Vec::new(),
        probes: Vec::new(),
    };
    let event_sources = Arc::new(EventSources::new(None, false, false).unwrap());
    let (limits, keep) = (Limits::default(), KeepPolicy::default());
    Service::new(host, Arc::new(SyscallsProbe), event_sources, limits, keep, PathBuf::new())
}

/// A request that ends on the thread of the async runtime frees no memory there.
#[tokio::test]
async fn deleted_file_that_a_request_uses_is_freed_in_a_thread_for_ends() {
    let service = service();
    let caller = Caller { uid: 5, gid: 5, groups: Vec::new(), admin: false };
    let (backing, seals) = (Backing::Shmem, Seals::default());
    let spec =
        FileSpec { name: "ram".to_owned(), size_bytes: 4096, backing, seals, access: None, lifetime: None };
    let request = service.registry.create(&caller, spec).unwrap();
    let file = Arc::downgrade(&request);
    let delete = Arc::clone(&service);
    let deleted = tokio::task::spawn_blocking(move || {
        let name = FileName::Name("ram".to_owned());
        let ended = delete.registry.delete(&caller, &name).unwrap();
        delete.drop_ended(ended);
    });
    deleted.await.unwrap();
    tokio::time::sleep(2 * IN_USE_INTERVAL).await;
    assert_eq!(file.strong_count(), 2, "the request, and the service");
    drop(request);
    assert_eq!(file.strong_count(), 1, "the request did not free it");
    let started = Instant::now();
    while file.strong_count() > 0 {
        assert!(started.elapsed() < Duration::from_secs(20), "it is not freed");
        tokio::time::sleep(IN_USE_INTERVAL).await;
    }
}
