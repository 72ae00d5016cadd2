//! A door that opens when it was counted down often enough.

use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};

use crate::cell::{Change, SharedCell};
use crate::client::Client;
use crate::engine::ClaimId;
use crate::error::{Error, Result};
use crate::name::Name;
use crate::sync;

/// A door that opens when it was counted down `count` times, and then stays open. Made by
/// [`Lockset::latch`](crate::Lockset::latch).
///
/// The count outlives the processes that counted: it stays until [`clear`](Latch::clear). All who
/// use the name must agree on the count.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockset::Result<()> {
/// let locks = lockset::Lockset::connect("memory:").await?;
/// let imported = locks.latch("import/2026-11-15", 2)?;
///
/// assert_eq!(imported.count_down().await?, 1);
/// assert_eq!(imported.count_down().await?, 0);
/// imported.wait().await?;
/// imported.clear().await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Latch {
    cell: SharedCell,
    count: u32,
    /// The ids of counts that may have been made: the next count down repeats one of them.
    unsure: Arc<Mutex<Vec<ClaimId>>>,
}

/// The counts that were made, by their ids, so that none counts twice.
#[derive(Serialize, Deserialize)]
struct Counted {
    count: u32,
    by: Vec<ClaimId>,
}

impl Latch {
    /// The greatest count.
    pub const MAX_COUNT: u32 = 1000;

    pub(crate) fn new(client: Arc<Client>, name: Name, count: u32) -> Result<Self> {
        if count == 0 || count > Self::MAX_COUNT {
            let why = format!("a latch counts down from 1 to {}", Self::MAX_COUNT);
            return Err(Error::invalid("count", &count.to_string(), why));
        }
        Ok(Self { cell: SharedCell::new(client, name)?, count, unsure: Arc::default() })
    }

    /// The name of the latch.
    pub fn name(&self) -> &Name {
        &self.cell.name
    }

    /// Counts down by one and returns what remains. An open latch stays open.
    ///
    /// A request without a reply is repeated for five seconds, and counts once.
    ///
    /// # Errors
    /// [`Error::Conflict`] if others use the name with another count.
    /// [`Error::Unreachable`] if the engine does not reply; call it again then, on this latch or a
    /// clone of it, and both calls together count once.
    ///
    /// # Cancel safety
    /// If cancelled, call it again: both calls together count once.
    pub async fn count_down(&self) -> Result<u32> {
        let count = Count::begin(&self.unsure);
        let id = count.id;
        let counted = self
            .cell
            .change(|found| {
                let mut counted = self.agreed(found)?;
                if counted.remaining() == 0 || counted.by.contains(&id) {
                    return Ok(Change::Keep(counted.remaining()));
                }
                counted.by.push(id);
                let remaining = counted.remaining();
                Ok(Change::Write(counted, remaining))
            })
            .await;
        if counted.is_ok() {
            count.settle();
        }
        counted
    }

    /// Waits until the latch is open.
    ///
    /// # Errors
    /// [`Error::Conflict`] if others use the name with another count; [`Error::Unreachable`].
    ///
    /// # Cancel safety
    /// Cancel safe: it only observes.
    pub async fn wait(&self) -> Result<()> {
        self.cell.wait(|found| Ok((self.agreed(found)?.remaining() == 0).then_some(()))).await
    }

    /// How often it must still be counted down.
    ///
    /// # Errors
    /// As [`wait`](Latch::wait).
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn remaining(&self) -> Result<u32> {
        Ok(self.agreed(self.cell.read().await?)?.remaining())
    }

    /// Forgets the latch: the next use begins with a full count.
    ///
    /// # Errors
    /// [`Error::Unreachable`].
    ///
    /// # Cancel safety
    /// May be cancelled and repeated.
    pub async fn clear(&self) -> Result<()> {
        self.cell.remove().await
    }

    fn agreed(&self, found: Option<Counted>) -> Result<Counted> {
        let counted = found.unwrap_or(Counted { count: self.count, by: Vec::new() });
        if counted.count != self.count {
            let why = format!("it is a latch of {}, not of {}", counted.count, self.count);
            return Err(self.cell.conflict(why));
        }
        Ok(counted)
    }
}

impl Counted {
    fn remaining(&self) -> u32 {
        self.count.saturating_sub(u32::try_from(self.by.len()).unwrap_or(u32::MAX))
    }
}

/// A count under way. Dropped before it is known to be made, it is the next one to be made.
struct Count<'a> {
    unsure: &'a Mutex<Vec<ClaimId>>,
    id: ClaimId,
    is_made: bool,
}

impl<'a> Count<'a> {
    fn begin(unsure: &'a Mutex<Vec<ClaimId>>) -> Self {
        let id = sync::lock(unsure).pop().unwrap_or_else(ClaimId::random);
        Self { unsure, id, is_made: false }
    }

    fn settle(mut self) {
        self.is_made = true;
    }
}

impl Drop for Count<'_> {
    fn drop(&mut self) {
        if !self.is_made {
            sync::lock(self.unsure).push(self.id);
        }
    }
}
