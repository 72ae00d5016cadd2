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

    /// Whether lockset's own group is in the foreground, so that it may give that place away.
    pub(crate) fn is_ours(&self) -> bool {
        tcgetpgrp(&self.0) == Ok(getpgrp())
    }

    /// Whether it may be given away for good: where lockset stands in a pipeline, others of its
    /// group may want the terminal too, such as a pager.
    pub(crate) fn is_for_us_alone(&self) -> bool {
        self.is_ours() && io::stdin().is_terminal() && io::stdout().is_terminal()
    }

    /// Takes the terminal back from the command's group, or from a group that is no more; not from
    /// the shell, to whom it belongs when lockset was sent to the background meanwhile.
    pub(crate) fn take_back(&self, group: Option<Pid>) {
        let Ok(foreground) = tcgetpgrp(&self.0) else { return };
        if Some(foreground) == group || test_kill_process_group(foreground) == Err(Errno::SRCH) {
            let _ = sys::set_foreground(&self.0, getpgrp());
        }
    }
}
