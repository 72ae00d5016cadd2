//! Marks in the memory of this process.

use std::collections::BTreeMap;
use std::sync::Mutex;

use async_trait::async_trait;

use crate::name::Name;
use crate::sync;
use crate::token::Token;

use super::{FenceError, FenceMark, FenceStore, FencingToken, check};

/// Marks in the memory of this process, for a resource that lives there too.
///
/// They do not survive a restart: use it where the resource does not either, and in tests.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let locks = lockset::Lockset::connect("memory:").await?;
/// use lockset::fence::MemoryFence;
///
/// let fence = MemoryFence::new();
/// let mutex = locks.mutex("orders/42")?;
/// let guard = mutex.lock().await?;
/// let mut orders = vec![];
/// fence.write(&"orders".parse()?, mutex.name(), &guard, || orders.push("paid"))?;
/// # Ok(()) }
/// ```
#[derive(Debug, Default)]
pub struct MemoryFence {
    marks: Mutex<BTreeMap<(Name, Name), Token>>,
}

impl MemoryFence {
    /// A store without marks.
    pub fn new() -> Self {
        Self::default()
    }

    /// Executes `write` if the token is admitted, and no other write meanwhile.
    ///
    /// # Errors
    /// [`FenceError::Stale`] and [`FenceError::WrongLock`]: `write` was not executed.
    pub fn write<T>(
        &self,
        resource: &Name,
        lock: &Name,
        token: impl Into<FencingToken>,
        write: impl FnOnce() -> T,
    ) -> Result<T, FenceError> {
        let token = token.into();
        let mut marks = sync::lock(&self.marks);
        let key = (resource.clone(), lock.clone());
        check(resource, lock, &token, marks.get(&key).copied())?;
        marks.insert(key, token.token());
        Ok(write())
    }
}

#[async_trait]
impl FenceStore for MemoryFence {
    async fn admit(
        &self,
        resource: &Name,
        lock: &Name,
        token: &FencingToken,
    ) -> Result<(), FenceError> {
        self.write(resource, lock, token, || ())
    }

    async fn marks(&self) -> Result<Vec<FenceMark>, FenceError> {
        let marks = sync::lock(&self.marks);
        let marks = marks.iter().map(|((resource, lock), token)| {
            FenceMark::new(resource.clone(), lock.clone(), *token)
        });
        Ok(marks.collect())
    }
}
