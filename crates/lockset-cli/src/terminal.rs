//! The controlling terminal and its foreground group.

use std::fs::File;
use std::io::{self, IsTerminal};

use rustix::io::Errno;
use rustix::process::{Pid, getpgrp, test_kill_process_group};
use rustix::termios::tcgetpgrp;

use crate::{guardian, sys};

/// The terminal of this session.
#[derive(Debug)]
pub(crate) struct Terminal(File);

impl Terminal {
    /// `None` without a terminal: under cron, in most containers.
    pub(crate) fn open() -> Option<Self> {
        guardian::terminal().map(Self)
    }

    /// Whether lockset's own group is in the foreground, so that it may pass the terminal on.
    pub(crate) fn is_ours(&self) -> bool {
        tcgetpgrp(&self.0) == Ok(getpgrp())
    }

    /// Whether it may be passed on for good: in a pipeline, others of lockset's group may need the
    /// terminal too, such as a pager.
    pub(crate) fn is_for_us_alone(&self) -> bool {
        self.is_ours() && io::stdin().is_terminal() && io::stdout().is_terminal()
    }

    /// Takes the terminal back from the command's group, or from a group that does not exist any
    /// more; not from the shell, which owns it if lockset was sent to the background meanwhile.
    pub(crate) fn reclaim(&self, group: Option<Pid>) {
        let Ok(foreground) = tcgetpgrp(&self.0) else { return };
        if Some(foreground) == group || test_kill_process_group(foreground) == Err(Errno::SRCH) {
            let _ = sys::set_foreground(&self.0, getpgrp());
        }
    }
}
