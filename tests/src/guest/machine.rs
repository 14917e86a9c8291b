//! A guest: its QEMU, its program, and its memory as the host sees it.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use super::disk::Disk;
use super::kernel::{CPU, Kernel};
use super::qmp::Qmp;
use super::serial::SerialLine;
use super::{Layout, MEMORY_MIB, PAGE, PAGES, PageSelection, READ_PAGES};
use crate::cgroup::Cgroup;
use crate::cleanup::{Cleanup, CleanupGuard};
use crate::{HarnessError, HarnessResult};

/// A command that starts another program, with its arguments in front of the program. May be empty.
#[derive(Clone, Debug, Default)]
pub struct Wrapper(pub Vec<OsString>);

impl Wrapper {
    /// The command that starts a program.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        match self.0.split_first() {
            None => Command::new(program),
            Some((wrapper, arguments)) => {
                let mut command = Command::new(wrapper);
                command.args(arguments).arg(program);
                command
            }
        }
    }
}

#[derive(Debug, Default)]
pub struct Options<'a> {
    pub wrapper: Wrapper,
    /// An inherited descriptor of the memory file. `None`: QEMU creates a memfd.
    pub memory: Option<i32>,
    pub cgroup: Option<&'a Cgroup>,
    /// A disk that QEMU reads with O_DIRECT and native AIO.
    pub disk: Option<&'a Disk>,
    /// The vhost-user socket of a disk in another process.
    pub vhost_user: Option<&'a Path>,
}

/// A running guest, killed on drop. Its first disk is `/dev/vda`.
#[derive(Debug)]
pub struct Guest {
    line: SerialLine,
    monitor: Qmp,
    layout: Layout,
    memory: File,
    _process: CleanupGuard,
    _folder: CleanupGuard,
}

impl Guest {
    /// Starts a guest, and waits until `guest_init` takes commands.
    ///
    /// # Errors
    /// [`HarnessError::Missing`] without QEMU or a kernel; [`HarnessError::Agent`] with the guest's log if it does not boot.
    pub fn start(options: &Options<'_>) -> HarnessResult<Self> {
        let (folder, guard) = crate::host::temp_dir("fdmap-guest-")?;
        let kernel = Kernel::find(&folder)?;
        let mut command = command(options, &kernel, &folder);
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped());
        let child = command.spawn().map_err(|error| not_started(&command, &error))?;
        let process = CleanupGuard::new(Cleanup::process(child.id()))?;
        let mut line = SerialLine::to(child, folder.join("console"))?;
        if let Some(cgroup) = options.cgroup {
            cgroup.add(line.pid())?;
        }
        line.done()?;
        let layout = Layout::parse(&line.call("pages")?)?;
        let memory = memory_of(line.pid(), false)?;
        let monitor = Qmp::connect(&folder.join("monitor"))?;
        Ok(Self { line, monitor, layout, memory, _process: process, _folder: guard })
    }

    /// The process of QEMU.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.line.pid()
    }

    #[must_use]
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Writes a selection of pages. Returns their indexes in the memfd after checking their content there.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn write(&mut self, set: PageSelection) -> HarnessResult<Vec<u64>> {
        self.line.call(&format!("write {} {}", set.seed, set.per_mille))?;
        let expected: Vec<_> =
            set.places().map(|place| (self.layout.pages[place], set.content(place))).collect();
        self.find(&expected)
    }

    /// Reads `count` pages of a disk, from `first` on, to the pages of [`Layout::read`] from `place` on. Returns their indexes in
    /// the memfd after checking their content there.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    ///
    /// # Panics
    /// If the guest has fewer pages.
    pub fn read(&mut self, disk: &Disk, first: u64, count: u64, place: usize) -> HarnessResult<Vec<u64>> {
        self.line.call(&format!("read /dev/vda {first} {count} {place}"))?;
        let to = &self.layout.read[place..place + count as usize];
        let expected: Vec<_> = (first..).zip(to).map(|(page, to)| (*to, disk.content(page))).collect();
        self.find(&expected)
    }

    /// Starts continuous reads of a disk into guest memory.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn start_reads(&mut self, disk: &Disk) -> HarnessResult<()> {
        let blocks = disk.pages() / super::BLOCK_PAGES;
        self.line.call(&format!("busy /dev/vda {blocks}")).map(drop)
    }

    /// Stops the continuous reads.
    ///
    /// # Errors
    /// [`HarnessError::Agent`] if a read failed.
    pub fn stop_reads(&mut self) -> HarnessResult<()> {
        self.line.call("calm").map(drop)
    }

    /// The first 16 bytes of a page of the memfd.
    ///
    /// # Errors
    /// [`HarnessError::File`]
    pub fn page_start(&self, page: u64) -> HarnessResult<[u8; 16]> {
        let mut bytes = [0; 16];
        let failed =
            |error| HarnessError::File { what: "reading", path: format!("page {page}").into(), error };
        self.memory.read_exact_at(&mut bytes, page * PAGE).map_err(failed)?;
        Ok(bytes)
    }

    /// The memory, opened for reading and writing.
    ///
    /// # Errors
    /// [`HarnessError::File`]
    pub fn memory_for_writing(&self) -> HarnessResult<File> {
        memory_of(self.pid(), true)
    }

    /// Stops the vCPUs, and waits for the disks.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn pause(&mut self) -> HarnessResult<()> {
        self.monitor.execute("stop")
    }

    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn resume(&mut self) -> HarnessResult<()> {
        self.monitor.execute("cont")
    }

    fn find(&self, expected: &[(u64, [u8; 16])]) -> HarnessResult<Vec<u64>> {
        for (page, content) in expected {
            let found = self.page_start(*page)?;
            if found != *content {
                return Err(HarnessError::Agent(format!("page {page} holds {found:x?}, not {content:x?}")));
            }
        }
        Ok(expected.iter().map(|(page, _)| *page).collect())
    }
}

/// The memory of a guest: the only memfd that its QEMU has open, and of that size.
fn memory_of(pid: u32, writable: bool) -> HarnessResult<File> {
    let folder = format!("/proc/{pid}/fd");
    let failed = |error| HarnessError::File { what: "reading", path: folder.clone().into(), error };
    for entry in std::fs::read_dir(&folder).map_err(failed)?.flatten() {
        let path = entry.path();
        if std::fs::read_link(&path).is_ok_and(|target| target.to_string_lossy().starts_with("/memfd:")) {
            return File::options().read(true).write(writable).open(&path).map_err(failed);
        }
    }
    Err(HarnessError::Agent(format!("QEMU, process {pid}, has no memfd")))
}

/// The error of a program that was not started.
pub(super) fn not_started(command: &Command, error: &std::io::Error) -> HarnessError {
    let program = command.get_program().display();
    if error.kind() == std::io::ErrorKind::NotFound {
        return HarnessError::Missing(format!("the program {program}"));
    }
    HarnessError::Program { program: program.to_string(), message: error.to_string() }
}

/// An unpatched QEMU without KVM.
fn command(options: &Options<'_>, kernel: &Kernel, folder: &Path) -> Command {
    let in_folder = |name: &str| folder.join(name).display().to_string();
    let mut command = options.wrapper.command("qemu-system-x86_64");
    command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
    command.args(["-machine", "pc,memory-backend=ram", "-accel", "tcg,tb-size=32", "-cpu", CPU]);
    command.args(["-m", &format!("{MEMORY_MIB}M")]);
    let memory = match options.memory {
        None => "memory-backend-memfd".to_owned(),
        Some(fd) => format!("memory-backend-file,mem-path=/proc/self/fd/{fd}"),
    };
    command.args(["-object", &format!("{memory},id=ram,size={MEMORY_MIB}M,share=on")]);
    command.arg("-kernel").arg(&kernel.image).arg("-initrd").arg(&kernel.initramfs);
    // The kernel passes unknown parameters to guest_init in its environment.
    let words = [
        "console=ttyS0 panic=-1 nosmp nokaslr mitigations=off no_timer_check random.trust_cpu=on",
        "transparent_hugepage=never",
        &format!("pages={PAGES} read_pages={READ_PAGES}"),
    ];
    command.args(["-append", &words.join(" ")]);
    command.args(["-serial", &format!("file:{}", in_folder("console")), "-serial", "stdio"]);
    command.args(["-qmp", &format!("unix:{},server=on,wait=off", in_folder("monitor"))]);
    if let Some(disk) = options.disk {
        let path = disk.path().display();
        let drive = format!("file={path},format=raw,if=none,id=disk,cache=none,aio=native,readonly=on");
        command.args(["-drive", &drive, "-device", "virtio-blk-pci,drive=disk"]);
    }
    if let Some(socket) = options.vhost_user {
        command.args(["-chardev", &format!("socket,id=daemon,path={}", socket.display())]);
        command.args(["-device", "vhost-user-blk-pci,chardev=daemon"]);
    }
    command
}
