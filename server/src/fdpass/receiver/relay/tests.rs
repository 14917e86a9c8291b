use std::os::fd::AsFd as _;

use fdmap_sys::memfd;
use fdmap_sys::testing::hangup::wait_for_hangup;
use nix::poll::PollFlags;

use super::*;
use crate::fdpass::wire::BUFFER_BYTES;

/// A relay between two sockets of the test.
struct Fixture {
    client: OwnedFd,
    service: OwnedFd,
    relay: Relay,
    closer: Closer,
}

impl Fixture {
    fn waiting() -> Self {
        let (client, theirs) = scm::socket_pair().unwrap();
        let (service, ours) = scm::socket_pair().unwrap();
        // As the service leaves the client's socket; older kernels lack the option.
        let _ = scm::pass_descriptors(&theirs, false);
        Self { client, service, relay: Relay::new(theirs, ours), closer: Closer::start().unwrap() }
    }

    fn running() -> Self {
        let mut fixture = Self::waiting();
        fixture.reply(BEGIN);
        fixture.pump();
        fixture
    }

    /// Pumps as often as a session of a few packets needs.
    fn pump(&mut self) {
        for _ in 0..8 {
            self.relay.pump(&mut vec![0; BUFFER_BYTES], &self.closer);
        }
    }

    fn reply(&self, bytes: &[u8]) {
        scm::send(self.service.as_fd(), bytes, &[]).unwrap();
    }

    /// The next packet at the service: its header, its bytes and the number of descriptors that arrive.
    fn packet(&self) -> Option<(PacketHeader, Vec<u8>, usize)> {
        let mut buffer = vec![0; BUFFER_BYTES];
        let packet = scm::receive(self.service.as_fd(), &mut buffer).unwrap_or(None)?;
        let (header, bytes) = PacketHeader::decode(&buffer[..packet.len]).unwrap();
        Some((header, bytes.to_vec(), packet.descriptors.len()))
    }
}

#[test]
fn packets_wait_for_the_begin_of_the_session() {
    let mut fixture = Fixture::waiting();
    scm::send(fixture.client.as_fd(), b"early", &[]).unwrap();
    fixture.pump();
    assert_eq!(fixture.packet(), None);
    fixture.reply(BEGIN);
    fixture.pump();
    assert_eq!(fixture.packet(), Some((PacketHeader::default(), b"early".to_vec(), 0)));
    fixture.reply(b"reply");
    fixture.pump();
    let mut buffer = [0; 16];
    let reply = scm::receive(fixture.client.as_fd(), &mut buffer).unwrap().unwrap();
    assert_eq!(&buffer[..reply.len], b"reply");
}

#[test]
fn foreign_descriptors_do_not_reach_the_service() {
    let mut fixture = Fixture::running();
    let memfd = memfd::create("passed", None).unwrap();
    let (pipe, _other_end) = nix::unistd::pipe().unwrap();
    scm::send(fixture.client.as_fd(), b"good", &[memfd.as_fd()]).unwrap();
    scm::send(fixture.client.as_fd(), b"bad", &[memfd.as_fd(), pipe.as_fd()]).unwrap();
    fixture.pump();
    let header = PacketHeader { descriptors: 1, ..PacketHeader::default() };
    assert_eq!(fixture.packet(), Some((header, b"good".to_vec(), 1)));
    let unanswered = |fixture: &Fixture| fixture.relay.unanswered.iter().map(Vec::len).collect::<Vec<_>>();
    assert_eq!(unanswered(&fixture), [1], "descriptors stay open until their packet is replied to");
    fixture.reply(b"reply");
    fixture.pump();
    let header = PacketHeader { descriptors: 2, foreign: true, ..PacketHeader::default() };
    assert_eq!(fixture.packet(), Some((header, b"bad".to_vec(), 0)));
    assert_eq!(unanswered(&fixture), [0]);
}

#[test]
fn reply_with_a_descriptor_waits_until_the_client_has_read_the_others() {
    let mut fixture = Fixture::running();
    let memfd = memfd::create("passed", None).unwrap();
    for _ in 0..2 {
        scm::send(fixture.service.as_fd(), b"reply", &[memfd.as_fd()]).unwrap();
    }
    for waits in [true, false] {
        fixture.pump();
        assert_eq!(fixture.relay.has_deadline(), waits);
        let reply = scm::receive(fixture.client.as_fd(), &mut [0; 16]).unwrap().unwrap();
        assert_eq!(reply.descriptors.len(), 1);
    }
}

#[test]
fn client_that_sends_nothing_more_gets_its_reply() {
    let mut fixture = Fixture::running();
    scm::send(fixture.client.as_fd(), b"last", &[]).unwrap();
    shutdown(fixture.client.as_raw_fd(), Shutdown::Write).unwrap();
    fixture.pump();
    assert!(fixture.packet().is_some() && !fixture.relay.has_ended());
    fixture.reply(b"reply");
    fixture.pump();
    assert_eq!(scm::receive(fixture.client.as_fd(), &mut [0; 16]).unwrap().unwrap().len, 5);
}

#[test]
fn end_of_either_side_ends_the_other() {
    let mut fixture = Fixture::running();
    drop(fixture.client);
    fixture.client = fixture.service.try_clone().unwrap();
    wait_for_hangup(fixture.relay.client.as_fd());
    fixture.pump();
    assert!(fixture.relay.has_ended());

    let mut fixture = Fixture::running();
    let (service, _) = scm::socket_pair().unwrap();
    fixture.reply(b"fatal");
    fixture.service = service;
    wait_for_hangup(fixture.relay.service.as_fd());
    fixture.pump();
    assert!(fixture.relay.has_ended());
    assert_eq!(scm::receive(fixture.client.as_fd(), &mut [0; 16]).unwrap().unwrap().len, 5);
    fixture.relay.end(&fixture.closer);
    wait_for_hangup(fixture.client.as_fd());
    assert!(scm::receive(fixture.client.as_fd(), &mut [0; 16]).unwrap().is_none());
}

/// The service may close its queue, with the packet, at any time after the end of the session.
#[test]
fn descriptors_stay_open_while_their_packet_is_in_the_queue_of_the_service() {
    for receives in [true, false] {
        let mut fixture = Fixture::running();
        let memfd = memfd::create("queued", None).unwrap();
        scm::send(fixture.client.as_fd(), b"packet", &[memfd.as_fd()]).unwrap();
        fixture.pump();
        assert!(fixture.relay.has_unanswered());
        let Fixture { client, service, relay, closer } = fixture;
        drop(client);
        let ended = relay.end(&closer);
        assert!(!ended.is_released());
        if receives {
            let packet = scm::receive(service.as_fd(), &mut vec![0; BUFFER_BYTES]).unwrap().unwrap();
            assert_eq!(packet.descriptors.len(), 1);
        } else {
            drop(service);
            wait_for_hangup(ended.service.as_fd());
        }
        assert!(ended.is_released());
    }
}

#[test]
fn reply_that_the_client_does_not_read_waits() {
    let mut fixture = Fixture::running();
    while !fixture.relay.has_deadline() {
        fixture.reply(b"reply");
        fixture.pump();
    }
    // Nothing but the client's socket can continue the session.
    let [client, service] = fixture.relay.awaited();
    assert_eq!(client.map(|(_, events)| events), Some(PollFlags::POLLIN | PollFlags::POLLOUT));
    assert!(service.is_none());
    while scm::receive(fixture.client.as_fd(), &mut [0; 16]).is_ok() {}
    fixture.pump();
    assert!(!fixture.relay.has_deadline() && !fixture.relay.has_ended());
}

#[test]
fn packets_beyond_the_limit_stay_with_the_client() {
    let mut fixture = Fixture::running();
    for _ in 0..MAX_UNANSWERED + 3 {
        scm::send(fixture.client.as_fd(), b"x", &[]).unwrap();
    }
    for _ in 0..8 {
        fixture.pump();
    }
    let passed = std::iter::from_fn(|| fixture.packet()).count();
    assert_eq!(passed, MAX_UNANSWERED);
    fixture.reply(b"reply");
    fixture.pump();
    assert!(fixture.packet().is_some());
}
