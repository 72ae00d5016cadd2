//! What the standard library has no safe interface for: signal handlers, and the steps between
//! fork and exec. The only module of this crate with `unsafe` in it; everything it offers is safe.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Signal};

/// The descriptor under which the guardian finds its end of the link to lockset.
pub(crate) const LINK_FD: RawFd = 3;

/// Signals that lockset passes on to the command.
pub(crate) const FORWARDED: [i32; 9] = [
    libc::SIGINT,
    libc::SIGTERM,
    libc::SIGHUP,
    libc::SIGQUIT,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGWINCH,
    libc::SIGTSTP,
    libc::SIGCONT,
];

/// Signals that ask lockset to end while it waits for a lock.
pub(crate) const ENDING: [i32; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];

static WAS_IGNORED_PIPE: AtomicBool = AtomicBool::new(false);
static WAS_IGNORED_CHLD: AtomicBool = AtomicBool::new(false);
static SIGNAL_PIPE: AtomicI32 = AtomicI32::new(-1);
static CONTINUED: AtomicU32 = AtomicU32::new(0);

/// Runs before `main`, because Rust's own start-up sets SIGPIPE to ignored: the command must get
/// the dispositions that lockset was started with, so they are recorded before they are changed.
#[used]
#[cfg_attr(target_os = "linux", unsafe(link_section = ".init_array"))]
#[cfg_attr(target_vendor = "apple", unsafe(link_section = "__DATA,__mod_init_func"))]
static NOTE_DISPOSITIONS: extern "C" fn() = {
    extern "C" fn note() {
        WAS_IGNORED_PIPE.store(is_ignored(libc::SIGPIPE), Ordering::Relaxed);
        WAS_IGNORED_CHLD.store(is_ignored(libc::SIGCHLD), Ordering::Relaxed);
    }
    note
};

/// Makes this process the parent of all its orphaned descendants.
pub(crate) fn adopt_orphans() -> io::Result<()> {
    #[cfg(target_os = "linux")]
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    Ok(())
}

/// From now on each of these signals writes its number into the returned stream, except those that
/// were ignored when the process started: `nohup` and `cmd &` mean what they say.
pub(crate) fn signal_stream(signals: &[i32]) -> io::Result<UnixStream> {
    let (reader, writer) = UnixStream::pair()?;
    reader.set_nonblocking(true)?;
    writer.set_nonblocking(true)?;
    SIGNAL_PIPE.store(writer.as_raw_fd(), Ordering::SeqCst);
    // The handler may write at any time until the process ends, so its end is never closed.
    std::mem::forget(writer);
    for &signal in signals {
        if signal == libc::SIGCHLD || !is_ignored(signal) {
            handle(signal, on_signal as *const () as libc::sighandler_t)?;
        }
    }
    Ok(reader)
}

/// Blocks every signal but SIGCHLD, for the guardian: only SIGKILL may end it.
pub(crate) fn block_signals() {
    // SAFETY: the set is initialised by sigfillset before it is used; with a valid set and a valid
    // `how` the call cannot fail.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigfillset(&mut set);
        libc::sigdelset(&mut set, libc::SIGCHLD);
        libc::pthread_sigmask(libc::SIG_SETMASK, &set, std::ptr::null_mut());
    }
}

/// Blocks no signal: lockset may have been started by a thread that blocks some, and then it could
/// not be ended. Async-signal-safe.
pub(crate) fn unblock_signals() {
    // SAFETY: the set is initialised by sigemptyset before it is used; the call cannot fail.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::pthread_sigmask(libc::SIG_SETMASK, &set, std::ptr::null_mut());
    }
}

/// Starts the guardian: own process group, one end of the link as descriptor 3, nothing else open.
pub(crate) fn spawn_guardian(command: &mut Command, link: &UnixStream) -> io::Result<Child> {
    let link = link.as_raw_fd();
    // SAFETY: the closure only makes async-signal-safe system calls and touches no heap.
    unsafe {
        command.pre_exec(move || {
            check(libc::setpgid(0, 0))?;
            if link == LINK_FD {
                check(libc::fcntl(LINK_FD, libc::F_SETFD, 0))?;
            } else {
                check(libc::dup2(link, LINK_FD))?;
            }
            close_on_exec_from(LINK_FD + 1);
            restore_dispositions();
            Ok(())
        });
    }
    command.spawn()
}

/// The guardian's end of the link, at the guardian's start.
pub(crate) fn link_of_guardian() -> io::Result<UnixStream> {
    use std::os::fd::FromRawFd;
    // SAFETY: descriptor 3 is looked at, not used, until it is known to be a socket.
    let is_socket = unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        libc::fstat(LINK_FD, &mut stat) == 0 && stat.st_mode & libc::S_IFMT == libc::S_IFSOCK
    };
    if !is_socket {
        return Err(io::Error::other("this is an inner command of lockset, not to be called"));
    }
    // SAFETY: it is open, and nothing else in this process, which has just begun, owns it.
    let link = unsafe { UnixStream::from_raw_fd(LINK_FD) };
    rustix::io::fcntl_setfd(&link, rustix::io::FdFlags::CLOEXEC)?;
    Ok(link)
}

/// Starts the command as the guardian's child: own process group, in the foreground of `terminal`
/// if one is given, no descriptors but the standard three, killed when the guardian dies.
pub(crate) fn spawn_command(command: &mut Command, terminal: Option<&File>) -> io::Result<Child> {
    let terminal = terminal.map_or(-1, |terminal| terminal.as_raw_fd());
    let guardian = std::process::id() as libc::pid_t;
    // SAFETY: the closure only makes async-signal-safe system calls and touches no heap.
    unsafe {
        command.pre_exec(move || {
            check(libc::setpgid(0, 0))?;
            die_with(guardian)?;
            if terminal >= 0 {
                let own = libc::getpgrp();
                // If the terminal went away, the command notices it.
                let _ = without_ttou(|| libc::tcsetpgrp(terminal, own));
            }
            close_on_exec_from(3);
            restore_dispositions();
            Ok(())
        });
    }
    command.spawn()
}

/// Makes `group` the foreground group of the terminal, also when called from the background.
pub(crate) fn set_foreground(terminal: &File, group: Pid) -> io::Result<()> {
    without_ttou(|| rustix::termios::tcsetpgrp(terminal.as_fd(), group))?;
    Ok(())
}

/// What is stopped.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Stop {
    /// This process, by a signal.
    Lockset,
    /// Its whole group, that is, the shell's job: the command's group was stopped by Ctrl-Z, which
    /// the rest of the job has not seen.
    Job,
}

/// Stops as Ctrl-Z would have, so that the shell sees a stopped job. Returns after having been
/// continued; `false` if the kernel does not stop us, because no shell could continue us.
pub(crate) fn stop(whom: Stop) -> io::Result<bool> {
    if is_ignored(libc::SIGTSTP) {
        return Ok(false);
    }
    let before = CONTINUED.load(Ordering::SeqCst);
    handle(libc::SIGTSTP, libc::SIG_DFL)?;
    match whom {
        Stop::Lockset => rustix::process::kill_process(rustix::process::getpid(), Signal::TSTP)?,
        Stop::Job => rustix::process::kill_current_process_group(Signal::TSTP)?,
    }
    // Any thread may take the signal, so the stop may come a moment after kill returned.
    std::thread::sleep(Duration::from_millis(20));
    handle(libc::SIGTSTP, on_signal as *const () as libc::sighandler_t)?;
    Ok(CONTINUED.load(Ordering::SeqCst) != before)
}

/// Ends by a signal of the terminal, without a core of our own; or sends the signal that only the
/// command got to the whole job, so that a script around lockset ends as if it had run the command
/// itself. Returns if we survive it.
pub(crate) fn interrupt(signal: i32, whole_job: bool) {
    let Some(named) = Signal::from_named_raw(signal) else { return };
    let nothing = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
    let _ = rustix::process::setrlimit(rustix::process::Resource::Core, nothing);
    if handle(signal, libc::SIG_DFL).is_ok() {
        let _ = match whole_job {
            true => rustix::process::kill_current_process_group(named),
            false => rustix::process::kill_process(rustix::process::getpid(), named),
        };
    }
}

/// Time that goes on while the machine sleeps, the same for all processes of this machine.
pub(crate) fn now() -> Duration {
    Duration::from_nanos(lockset::clock::Clock::boot().now().as_nanos())
}

/// Names the process for `ps`.
pub(crate) fn name_process(name: &std::ffi::CStr) {
    #[cfg(target_os = "linux")]
    // SAFETY: PR_SET_NAME reads a NUL-terminated string, which a CStr is.
    unsafe {
        libc::prctl(libc::PR_SET_NAME, name.as_ptr());
    }
    #[cfg(not(target_os = "linux"))]
    let _ = name;
}

extern "C" fn on_signal(signal: libc::c_int) {
    if signal == libc::SIGCONT {
        CONTINUED.fetch_add(1, Ordering::SeqCst);
    }
    let byte = signal as u8;
    // SAFETY: write is async-signal-safe and the descriptor is never closed; errno, which the
    // interrupted code may be about to read, is put back. A full pipe loses a repeat, no more.
    unsafe {
        let errno = errno_place();
        let before = *errno;
        libc::write(SIGNAL_PIPE.load(Ordering::SeqCst), (&raw const byte).cast(), 1);
        *errno = before;
    }
}

unsafe fn errno_place() -> *mut libc::c_int {
    // SAFETY: both give the address of the calling thread's own errno.
    unsafe {
        #[cfg(target_vendor = "apple")]
        return libc::__error();
        #[cfg(not(target_vendor = "apple"))]
        return libc::__errno_location();
    }
}

fn is_ignored(signal: i32) -> bool {
    // SAFETY: with a null new action, sigaction only fills in the old one.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut action) == 0
            && action.sa_sigaction == libc::SIG_IGN
    }
}

fn handle(signal: i32, handler: libc::sighandler_t) -> io::Result<()> {
    // SAFETY: the action is fully initialised, and the only handler ever passed is `on_signal`,
    // which is async-signal-safe.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler;
        action.sa_flags = libc::SA_RESTART;
        libc::sigemptyset(&mut action.sa_mask);
        check(libc::sigaction(signal, &action, std::ptr::null_mut()))
    }
}

/// Between fork and exec: handlers fall back to default by themselves and what was ignored stays
/// so, except for the two signals that Rust or we had to change. Nothing stays blocked.
fn restore_dispositions() {
    unblock_signals();
    for (signal, was_ignored) in
        [(libc::SIGPIPE, &WAS_IGNORED_PIPE), (libc::SIGCHLD, &WAS_IGNORED_CHLD)]
    {
        let action =
            if was_ignored.load(Ordering::Relaxed) { libc::SIG_IGN } else { libc::SIG_DFL };
        let _ = handle(signal, action);
    }
}

/// Between fork and exec: the kernel kills this process when its parent dies.
fn die_with(parent: libc::pid_t) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    // SAFETY: prctl with these arguments and getppid have no memory effects.
    unsafe {
        check(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL))?;
        // The parent may have died before the request was in place.
        if libc::getppid() != parent {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = parent;
    Ok(())
}

/// Between fork and exec: no descriptor from `first` on reaches the new program.
fn close_on_exec_from(first: RawFd) {
    #[cfg(target_os = "linux")]
    {
        let flag = libc::CLOSE_RANGE_CLOEXEC as libc::c_uint;
        // SAFETY: only marks descriptors; none is closed in this process.
        let done = unsafe {
            libc::syscall(libc::SYS_close_range, first as libc::c_uint, libc::c_uint::MAX, flag)
        };
        if done == 0 {
            return;
        }
    }
    // Kernels before 5.11, and other systems. Failures are descriptors that are not open.
    // SAFETY: getrlimit fills in the structure; fcntl only marks descriptors.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit);
        for fd in first..limit.rlim_cur.min(65_536) as RawFd {
            libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC);
        }
    }
}

/// Runs `call` with SIGTTOU blocked: the kernel then lets a background process, too, choose the
/// terminal's foreground group. Async-signal-safe if `call` is.
fn without_ttou<T>(call: impl FnOnce() -> T) -> T {
    // SAFETY: both sets are initialised before use, and the old mask is put back on this thread.
    unsafe {
        let mut ttou = std::mem::zeroed();
        let mut before = std::mem::zeroed();
        libc::sigemptyset(&mut ttou);
        libc::sigaddset(&mut ttou, libc::SIGTTOU);
        libc::pthread_sigmask(libc::SIG_BLOCK, &ttou, &mut before);
        let answer = call();
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
        answer
    }
}

/// The result of a system call. Async-signal-safe: it allocates nothing.
fn check(answer: libc::c_int) -> io::Result<()> {
    if answer == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
