//! Lock names and node paths, in both directions.

use super::layout::Layout;
use crate::error::{Error, Result};
use crate::name::Name;
use crate::url::percent_decode;

/// The child of the chroot that cells are below. No lock has this name, because a `%` in a name is
/// written `%25`.
const CELLS: &str = "%cells";

/// Translates names to paths and back.
#[derive(Clone, Debug)]
pub(super) struct NodePaths {
    pub(super) chroot: String,
    /// Names are used as paths without escaping, for locks that other programs take, too.
    pub(super) raw_names: bool,
}

impl NodePaths {
    /// The node whose children are the claims of `name`.
    pub(super) fn lock_parent(&self, name: &Name) -> Result<String> {
        if !self.raw_names {
            return Ok(format!("{}/{}", self.chroot, escape(name.as_str())));
        }
        let text = name.as_str();
        let why = match text.chars().any(must_be_escaped) {
            true => "it has a character that no ZooKeeper path may have; use it without names=raw",
            false if text.split('/').next() == Some(CELLS) => {
                "cells are stored there; use it without names=raw"
            }
            false => return Ok(format!("{}/{text}", self.chroot)),
        };
        Err(Error::invalid("lock name", text, why))
    }

    /// The node that all cells are below.
    pub(super) fn cells_root(&self) -> String {
        format!("{}/{CELLS}", self.chroot)
    }

    /// The node of the cell of `name`.
    pub(super) fn cell_node(&self, name: &Name) -> String {
        format!("{}/{CELLS}/{}", self.chroot, escape(name.as_str()))
    }

    /// Whether this child of the chroot is the node that all cells are below.
    pub(super) fn is_cells_root(&self, child: &str) -> bool {
        child == CELLS
    }

    /// The name whose cell is this child of the cells' root.
    pub(super) fn name_of_cell(&self, node: &str) -> Option<Name> {
        percent_decode(node)?.parse().ok().filter(|name: &Name| escape(name.as_str()) == node)
    }

    /// The name whose lock has this parent, given relative to the chroot.
    pub(super) fn name_of_lock(&self, relative: &str) -> Option<Name> {
        if self.raw_names {
            return relative.parse().ok().filter(|name| self.lock_parent(name).is_ok());
        }
        // Must escape to the same text: a name has one node.
        percent_decode(relative)?
            .parse()
            .ok()
            .filter(|name: &Name| escape(name.as_str()) == relative)
    }

    /// The name that a change at `path` concerns.
    pub(super) fn name_at(&self, path: &str, layout: Layout) -> Option<Name> {
        let relative = path.strip_prefix(&self.chroot)?.strip_prefix('/')?;
        let (first, rest) = relative.split_once('/').unwrap_or((relative, ""));
        if first == CELLS {
            return self.name_of_cell(rest.split('/').next()?);
        }
        if !self.raw_names {
            return self.name_of_lock(first);
        }
        let (parent, last) = relative.rsplit_once('/')?;
        layout.is_claim(last).then(|| self.name_of_lock(parent)).flatten()
    }
}

/// Turns a name into one segment of a path, so that the nodes of `a` and `a/b` do not overlap.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c == '/' || c == '%' || must_be_escaped(c) {
            let mut bytes = [0; 4];
            for byte in c.encode_utf8(&mut bytes).bytes() {
                out.push_str(&format!("%{byte:02X}"));
            }
        } else {
            out.push(c);
        }
    }
    out
}

/// Characters that ZooKeeper rejects in a path: control and private characters, some specials, and
/// those that Java encodes as surrogates.
fn must_be_escaped(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{E000}'..='\u{F8FF}' | '\u{FFF0}'..='\u{FFFF}')
        || c > '\u{FFFF}'
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_path_segment_and_is_restored() {
        let paths = NodePaths { chroot: "/lockset".to_owned(), raw_names: false };
        for (name, path) in [
            ("a", "/lockset/a"),
            ("a/b", "/lockset/a%2Fb"),
            ("%cells", "/lockset/%25cells"),
            ("a%2Fb", "/lockset/a%252Fb"),
            ("größe 1", "/lockset/größe 1"),
            ("\u{E000}\u{FFFD}😀", "/lockset/%EE%80%80%EF%BF%BD%F0%9F%98%80"),
        ] {
            let name: Name = name.parse().unwrap();
            assert_eq!(paths.lock_parent(&name).unwrap(), path);
            assert_eq!(
                paths.name_of_lock(path.strip_prefix("/lockset/").unwrap()),
                Some(name.clone())
            );
            let node = format!("{path}/_c_x-lock-0000000001");
            assert_eq!(paths.name_at(&node, Layout::Curator), Some(name.clone()));
            let cell = format!("{}/generation", paths.cell_node(&name));
            assert_eq!(paths.name_at(&cell, Layout::Curator), Some(name));
        }
        assert_eq!(paths.name_at("/lockset/%cells", Layout::Curator), None);
        assert_eq!(paths.name_of_lock("a%2fb"), None, "another spelling is another node");
        assert_eq!(paths.name_at("/locksets/a", Layout::Curator), None);
    }

    #[test]
    fn raw_names_are_used_as_paths() {
        let paths = NodePaths { chroot: "/shared".to_owned(), raw_names: true };
        let name = |text: &str| text.parse::<Name>().unwrap();
        assert_eq!(paths.lock_parent(&name("jobs/42")).unwrap(), "/shared/jobs/42");
        assert_eq!(
            paths.name_at("/shared/jobs/42/_c_x-lock-0000000001", Layout::Curator),
            Some(name("jobs/42"))
        );
        assert_eq!(paths.name_at("/shared/jobs/42", Layout::Curator), None);
        assert!(
            paths.lock_parent(&name("%cells/x")).is_err()
                && paths.lock_parent(&name("😀")).is_err()
        );
    }
}
