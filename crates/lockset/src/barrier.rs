//! A place where several wait for each other.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::cell::{Change, SharedCell};
use crate::client::{CLEANUP_BACKOFF, Client, InFlight};
use crate::engine::ClaimId;
use crate::error::{Error, Result};
use crate::latch::Latch;
use crate::name::Name;
use crate::report::report;

/// How long a party tries to leave a barrier whose engine does not reply.
const LEAVE_FOR: Duration = Duration::from_secs(60);

/// A place where `parties` wait for each other, again and again. Made by
/// [`Lockset::barrier`](crate::Lockset::barrier).
///
/// A party that is cancelled while it waits leaves again. One whose process dies while it waits is
/// still counted: a barrier cannot know whether its work was done.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockset::Result<()> {
/// let locks = lockset::Lockset::connect("memory:").await?;
/// let (one, two) = (locks.barrier("phase", 2)?, locks.barrier("phase", 2)?);
///
/// let (first, second) = tokio::join!(one.wait(), two.wait());
/// assert!(first? != second?, "exactly one of them was the last to come");
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Barrier {
    cell: SharedCell,
    parties: u32,
}

#[derive(Serialize, Deserialize)]
struct Round {
    parties: u32,
    number: u64,
    here: Vec<ClaimId>,
    /// The parties of the round before, so that a repeated arrival is recognised: its reply was
    /// lost, and the others have completed the round meanwhile.
    #[serde(default)]
    before: Vec<ClaimId>,
    /// The party that completed the round before.
    last: Option<ClaimId>,
}

impl Barrier {
    pub(crate) fn new(client: Arc<Client>, name: Name, parties: u32) -> Result<Self> {
        if parties == 0 || parties > Latch::MAX_COUNT {
            let why = format!("a barrier is for 1 to {} parties", Latch::MAX_COUNT);
            return Err(Error::invalid("number of parties", &parties.to_string(), why));
        }
        Ok(Self { cell: SharedCell::new(client, name)?, parties })
    }

    /// The name of the barrier.
    pub fn name(&self) -> &Name {
        &self.cell.name
    }

    /// Waits until all parties are here. `true` for the one that came last.
    ///
    /// # Errors
    /// [`Error::Conflict`] if others use the name with another number of parties;
    /// [`Error::Unreachable`] if the engine does not reply for five seconds when this party
    /// arrives, which then leaves again. Once it has arrived, it waits whatever happens to the
    /// connection.
    ///
    /// # Cancel safety
    /// Cancel safe: dropped, this party leaves again in the background, unless all were already
    /// here.
    pub async fn wait(&self) -> Result<bool> {
        let id = ClaimId::random();
        let leave = Leave { barrier: self, id, armed: true, _in_flight: self.cell.start()? };
        let (number, last) = self.arrive(id).await?;
        if !last {
            self.cell
                .wait(|found| Ok((self.agreed(found)?.number != number).then_some(())))
                .await?;
        }
        leave.defuse();
        Ok(last)
    }

    /// How many are waiting.
    ///
    /// # Errors
    /// As [`wait`](Barrier::wait).
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn waiting(&self) -> Result<u32> {
        let round = self.agreed(self.cell.read().await?)?;
        Ok(u32::try_from(round.here.len()).unwrap_or(u32::MAX))
    }

    /// Forgets the barrier. Parties that wait go on.
    ///
    /// # Errors
    /// [`Error::Unreachable`].
    ///
    /// # Cancel safety
    /// May be cancelled and repeated.
    pub async fn clear(&self) -> Result<()> {
        self.cell.remove().await
    }

    /// The round this party waits in, and whether it came last in it.
    async fn arrive(&self, id: ClaimId) -> Result<(u64, bool)> {
        self.cell
            .change(|found| {
                let mut round = self.agreed(found)?;
                let number = round.number;
                if round.last == Some(id) || round.before.contains(&id) {
                    return Ok(Change::Keep((number.wrapping_sub(1), round.last == Some(id))));
                }
                if round.here.contains(&id) {
                    return Ok(Change::Keep((number, false)));
                }
                round.here.push(id);
                let complete = round.here.len() as u64 >= u64::from(self.parties);
                if complete {
                    round.before = std::mem::take(&mut round.here);
                    round.number = round.number.wrapping_add(1);
                    round.last = Some(id);
                }
                Ok(Change::Write(round, (number, complete)))
            })
            .await
    }

    /// Takes a party out again. Writes in any case: an arrival that is still under way then finds
    /// another version and fails.
    async fn leave(&self, id: ClaimId) -> Result<()> {
        self.cell
            .clean_up(|found| {
                let mut round = self.agreed(found)?;
                round.here.retain(|here| *here != id);
                Ok(Change::Write(round, ()))
            })
            .await
    }

    async fn leave_until_done(self, id: ClaimId) {
        let (give_up, mut backoff) = (self.cell.now() + LEAVE_FOR, CLEANUP_BACKOFF);
        while let Err(error) = self.leave(id).await {
            if !error.is_retryable() || self.cell.now() >= give_up {
                let name = &self.cell.name;
                report!(warn, name = name, error = error, "a party could not leave its barrier");
                return;
            }
            backoff.pause().await;
        }
    }

    fn agreed(&self, found: Option<Round>) -> Result<Round> {
        // A cleared barrier begins at a random round, so that those still waiting see a new one.
        let round = found.unwrap_or_else(|| Round {
            parties: self.parties,
            number: u64::from(rand::random::<u32>()),
            here: Vec::new(),
            before: Vec::new(),
            last: None,
        });
        if round.parties != self.parties {
            let why = format!("it is a barrier for {}, not for {}", round.parties, self.parties);
            return Err(self.cell.conflict(why));
        }
        Ok(round)
    }
}

/// A party that has not passed yet. Dropped, it leaves.
struct Leave<'a> {
    barrier: &'a Barrier,
    id: ClaimId,
    armed: bool,
    /// Closing waits until the party has left.
    _in_flight: InFlight<'a>,
}

impl Leave<'_> {
    fn defuse(mut self) {
        self.armed = false;
    }
}

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        if self.armed {
            let leaving = self.barrier.clone().leave_until_done(self.id);
            self.barrier.cell.in_background(leaving);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Lockset;

    #[tokio::test]
    async fn an_arrival_that_is_repeated_after_its_round_is_counted_once() {
        let locks = Lockset::connect("memory:").await.unwrap();
        let barrier = locks.barrier("start", 2).unwrap();
        let (first, second) = (ClaimId::random(), ClaimId::random());
        let (number, is_last) = barrier.arrive(first).await.unwrap();
        assert!(!is_last);
        assert_eq!(barrier.arrive(second).await.unwrap(), (number, true));
        // The replies to both were lost, and both ask again.
        assert_eq!(barrier.arrive(first).await.unwrap(), (number, false));
        assert_eq!(barrier.arrive(second).await.unwrap(), (number, true));
        assert_eq!(barrier.waiting().await.unwrap(), 0, "they stand in the next round");
    }
}
