//! Replies of a service to the client library, with descriptors. A thread plays the service on a socket, because the library
//! makes blocking calls. It sends one scripted packet for each request.

mod check;
mod drafts;

use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixListener;
use std::time::Duration;

use arbitrary::Arbitrary;
use fdmap_client::{Endpoint, FdpassClient, Timeouts};
use fdmap_proto::{FDPASS_VERSION, v1};
use fdmap_sys::scm;

use crate::draft::rare;
use crate::fdpass::open_descriptors;
use drafts::{CallDraft, Packet, PacketDraft};

/// A call of the library, and the reply to it.
#[derive(Arbitrary, Debug)]
pub struct Input {
    /// The reply to Hello; a valid one if absent.
    #[arbitrary(with = rare)]
    welcome: Option<PacketDraft>,
    call: CallDraft,
    reply: PacketDraft,
}

/// # Panics
/// If the library accepts a reply that it must refuse, or leaves descriptors open.
pub fn run(input: Input) {
    let folder = std::env::temp_dir().join(format!("fdmap-fuzz-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let endpoint = Endpoint::in_runtime_dir(&folder);
    let welcome = input.welcome.map_or_else(valid_welcome, |draft| draft.packet());
    let reply = input.reply.packet();
    // The packets hold descriptors.
    let before = open_descriptors();
    // The socket of the previous run.
    let _ = std::fs::remove_file(&endpoint.fdpass);
    // Accepts sockets of any type.
    let listener = UnixListener::from(scm::listen_at(&endpoint.fdpass).unwrap());
    listener.set_nonblocking(false).unwrap();
    std::thread::scope(|scope| {
        let service = scope.spawn(|| serve(&listener, [&welcome, &reply]));
        let timeouts = Timeouts { connect: Duration::from_secs(5), answer: Duration::from_secs(5) };
        match FdpassClient::connect(&endpoint, timeouts) {
            Ok(mut client) => {
                check::welcome(&welcome, &client);
                check::call(&mut client, &input.call, &reply);
            }
            Err(_) => assert!(!welcome.is_valid_welcome(), "{welcome:?} was refused"),
        }
        service.join().unwrap();
    });
    drop(listener);
    assert_eq!(open_descriptors(), before, "the library left descriptors open");
}

fn valid_welcome() -> Packet {
    let welcome =
        v1::Welcome { version: FDPASS_VERSION, server: "fuzz".to_owned(), instance: 1, page_size: 4096 };
    Packet::of(v1::fdpass_reply::Result::Welcome(welcome))
}

/// Answers the requests of one connection until the client closes it.
fn serve(listener: &UnixListener, packets: [&Packet; 2]) {
    let connection = OwnedFd::from(listener.accept().unwrap().0);
    let mut request = vec![0; 1 << 16];
    for packet in packets {
        let received = scm::receive(connection.as_fd(), &mut request);
        if received.is_ok_and(|request| request.is_none()) || packet.closes {
            return;
        }
        let descriptors: Vec<_> = packet.descriptors.iter().map(|fd| fd.as_fd()).collect();
        // Fails if the client has closed the connection.
        let _ = scm::send(connection.as_fd(), &packet.bytes, &descriptors);
    }
    // Until the client closes the connection.
    let _ = scm::receive(connection.as_fd(), &mut request);
}
