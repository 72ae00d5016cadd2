//! Whether this process is a fork of the one that made something.
//!
//! A forked child inherits guards and clients but neither the keeper's thread nor the right to
//! the parent's locks. `getpid` would tell, but it is a system call, and the question is asked in
//! every acquisition and every release; so the C library is asked once to tell us of forks.
//!
//! This is the library's only module with `unsafe` code. Children made by a bare `clone` system
//! call, past the C library, are not noticed.
#![allow(unsafe_code)]

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

static FORKS: AtomicU32 = AtomicU32::new(0);

/// How many forks lie between this process and the one that asked first. Two equal answers mean
/// the same process.
pub(crate) fn generation() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

/// Begins to count. To be called before the first [`generation`] that is kept.
pub(crate) fn notice() {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        // SAFETY: the handler is a plain function that lives as long as the process and does
        // nothing but add to an atomic, which is allowed in a child between fork and exec.
        // If there is no memory to register it, forks go unnoticed, as with a bare `clone`.
        let _ = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}

extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_knows_that_it_is_one() {
        notice();
        let here = generation();
        // SAFETY: the child calls nothing but an atomic load and `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: `_exit` is allowed after fork.
            unsafe { libc::_exit(i32::from(generation() == here)) };
        }
        let mut status = 0;
        // SAFETY: `status` outlives the call.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0, "the child thought that it was its parent");
        assert_eq!(generation(), here);
    }
}
