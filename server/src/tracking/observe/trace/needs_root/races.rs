//! Concurrent writers: every changed byte must be reported.

use super::*;

const PAGE: usize = 4096;
const PAGES: usize = 1024;

/// A deterministic pseudo-random generator.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// Writes a random range by a random call. With `movers`, also uses calls that move the shared file position backwards.
fn write_somehow(bench: &Bench, numbers: &mut Numbers, pipe: &(OwnedFd, OwnedFd), movers: bool) {
    let token = 1 + u8::try_from(numbers.below(255)).unwrap();
    let fd = &bench.fd;
    let length = to_usize(1 + numbers.below(3 * to_u64(PAGE)));
    let offset = numbers.below(to_u64((PAGES - 4) * PAGE)).cast_signed();
    let data = vec![token; length];
    match numbers.below(if movers { 32 } else { 30 }) {
        0..10 => assert_eq!(uio::pwrite(fd, &data, offset), Ok(length)),
        10..20 => assert_eq!(nix::unistd::write(fd, &data), Ok(length)),
        20..30 => assert_eq!(uio::pwritev(fd, &[IoSlice::new(&data)], offset), Ok(length)),
        30 => lseek(fd, offset),
        _ => {
            assert_eq!(write(&pipe.1, length), Ok(length));
            assert_eq!(splice(&pipe.0, fd, None, length), Ok(length));
        }
    }
}

fn content(bench: &Bench) -> Vec<u8> {
    let mut content = vec![0; 2 * PAGES * PAGE];
    let mut read = 0;
    while read < content.len() {
        match uio::pread(&bench.fd, &mut content[read..], to_u64(read).cast_signed()).unwrap() {
            0 => break,
            some => read += some,
        }
    }
    content
}

/// In each round, all writers run concurrently and then stop. Every byte that differs must have been reported by a
/// drain during the round or by the one after it.
fn rounds(rounds: u64, writes: u64, movers: bool) -> Vec<ByteRange> {
    let bench = Bench::new();
    let mut all = Vec::new();
    let mut before = content(&bench);
    for round in 0..rounds {
        let over = AtomicBool::new(false);
        let mut reported = std::thread::scope(|scope| {
            let writers: Vec<_> = (0..4_u64)
                .map(|nth| {
                    let bench = &bench;
                    scope.spawn(move || {
                        let pipe = nix::unistd::pipe().unwrap();
                        let mut numbers = Numbers(1 + nth + round * 1000);
                        for _ in 0..writes {
                            write_somehow(bench, &mut numbers, &pipe, movers);
                        }
                    })
                })
                .collect();
            let asking = scope.spawn(|| {
                let mut reported = Vec::new();
                while !over.load(Ordering::Relaxed) {
                    let traced = bench.trace.drain(bench.followed);
                    assert!(!traced.lost);
                    reported.extend(traced.ended);
                }
                reported
            });
            for writer in writers {
                writer.join().unwrap();
            }
            over.store(true, Ordering::Relaxed);
            asking.join().unwrap()
        });
        reported.extend(bench.ended());
        all.extend(reported.iter().copied());
        join(&mut reported, 0);
        let now = content(&bench);
        for (offset, _) in before.iter().zip(&now).enumerate().filter(|(_, (before, now))| before != now) {
            let at = reported.partition_point(|range| range.offset <= to_u64(offset));
            let inside = at > 0 && reported[at - 1].end() > to_u64(offset);
            assert!(inside, "round {round}: byte {offset} changed, reported: {reported:?}");
        }
        before = now;
        lseek(&bench.fd, 0);
    }
    all
}

#[test]
fn no_write_is_lost_at_a_shared_position() {
    let reported = rounds(60, 40, false);
    assert!(!reported.contains(&EVERYTHING), "the position never moved backwards");
}

#[test]
fn no_write_is_lost_while_the_position_moves_backwards() {
    rounds(300, 8, true);
}

/// A descriptor of memfd_create raises no event, and the kernel looks it up between both tracepoints of a call.
#[test]
fn write_by_a_replaced_descriptor_can_leave_the_ctime_as_its_only_trace() {
    let (trace, fd, other) = (start(), memfd::create("replaced", None).unwrap(), file());
    memfd::resize(fd.as_fd(), SIZE).unwrap();
    let followed = follow(&trace, fd.as_fd());
    let target = other.try_clone().unwrap();
    let ctime = || fdmap_sys::fd::stat(&fd).map(|stat| (stat.st_ctime, stat.st_ctime_nsec)).unwrap();
    let stop = AtomicBool::new(false);
    let missed = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                for by in [&fd, &other] {
                    calls::replace_descriptor(target.as_fd(), by.as_fd()).unwrap();
                }
            }
        });
        let end = Instant::now() + Duration::from_secs(60);
        let content = || {
            let mut byte = [0];
            assert_eq!(uio::pread(&fd, &mut byte, 0), Ok(1));
            byte
        };
        let missed = (0..u8::MAX).cycle().take_while(|_| Instant::now() < end).find_map(|token| {
            let before = (content(), ctime());
            assert_eq!(uio::pwrite(&target, &[token], 0), Ok(1));
            let traced = trace.drain(followed);
            let is_traced = traced.lost || !traced.ended.is_empty();
            (content() != before.0 && !is_traced).then(|| ctime() != before.1)
        });
        stop.store(true, Ordering::Relaxed);
        missed
    });
    assert_eq!(missed, Some(true), "some write is traced by nothing, and changes the ctime");
}

/// No call depends on a shared file position.
#[test]
fn ranges_are_exact_where_positions_are_not_shared() {
    let bench = Bench::new();
    let mut expected: Vec<ByteRange> = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..4_u64)
            .map(|nth| {
                let bench = &bench;
                scope.spawn(move || {
                    let mut numbers = Numbers(77 + nth);
                    let mut wrote = Vec::new();
                    for _ in 0..2000 {
                        let length = 1 + numbers.below(9000);
                        let offset = numbers.below(SIZE - 9000);
                        pwrite(&bench.fd, to_usize(length), offset.cast_signed());
                        wrote.push(bytes(offset, length));
                    }
                    wrote
                })
            })
            .collect();
        writers.into_iter().flat_map(|writer| writer.join().unwrap()).collect()
    });
    join(&mut expected, 0);
    // Fewer ranges than the tracer keeps separate.
    assert_eq!(bench.ended(), expected);
}

/// Prints the cost of tracing without a limit, because hosts differ in speed and load.
#[test]
fn cost_of_tracing_is_printed() {
    let null = OpenOptions::new().write(true).open("/dev/null").unwrap();
    let (other, followed) = (file(), file());
    let measure = |what: &str| {
        let time = |call: &mut dyn FnMut()| {
            let runs = (0..30).map(|_| {
                let begin = Instant::now();
                (0..2000).for_each(|_| call());
                begin.elapsed().as_nanos() / 2000
            });
            runs.min().unwrap_or(0)
        };
        let getppid = time(&mut || {
            nix::unistd::getppid();
        });
        let write_to = |fd: BorrowedFd<'_>| time(&mut || assert_eq!(uio::pwrite(fd, b"x", 0), Ok(1)));
        let to_null = write_to(null.as_fd());
        let to_other = write_to(other.as_fd());
        let to_followed = write_to(followed.as_fd());
        eprintln!(
            "{what}: getppid {getppid} ns, pwrite to /dev/null {to_null}, to a file {to_other}, to the followed one \
             {to_followed}"
        );
    };
    measure("untraced");
    let trace = start();
    measure("nothing followed");
    let key = follow(&trace, followed.as_fd());
    measure("one followed");
    let begin = Instant::now();
    for _ in 0..1000 {
        assert!(trace.drain(key).in_flight.is_empty());
    }
    eprintln!("drain without records: {} ns", begin.elapsed().as_nanos() / 1000);
}
