//! Each law of a fence store fails on a register that breaks it, and all hold on a sound one.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use futures_util::FutureExt;
use lockset::fence::{FenceError, FenceMark, FencingToken, check as check_token};
use lockset::{Name, Token};
use lockset_testkit::fence_laws::{FencedRegister, LAWS, check};
use lockset_testkit::fence_suite;

/// What a register does wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Flaw {
    None,
    RejectsAnEqualToken,
    AdmitsALowerToken,
    WritesWhatItRejects,
    LowersTheMark,
    NeverRaisesTheMark,
    ForgetsAtARestart,
    SharesMarksOfLocks,
    SharesMarksOfResources,
    IgnoresTheLock,
    ChecksBeforeItWrites,
    AdmitsWhileStopped,
    ComparesAsDoubles,
    FoldsNames,
}

/// The law that must notice it.
const CAUGHT_BY: &[(Flaw, &str)] = &[
    (Flaw::RejectsAnEqualToken, "an_equal_token_is_admitted_again"),
    (Flaw::AdmitsALowerToken, "a_lower_token_changes_nothing"),
    (Flaw::WritesWhatItRejects, "a_lower_token_changes_nothing"),
    (Flaw::LowersTheMark, "a_lower_token_changes_nothing"),
    (Flaw::NeverRaisesTheMark, "a_greater_token_becomes_the_mark"),
    (Flaw::ForgetsAtARestart, "a_mark_survives_a_restart"),
    (Flaw::SharesMarksOfLocks, "locks_have_marks_of_their_own"),
    (Flaw::SharesMarksOfResources, "resources_have_marks_of_their_own"),
    (Flaw::IgnoresTheLock, "a_token_of_another_lock_is_rejected"),
    (Flaw::ChecksBeforeItWrites, "the_check_is_atomic_with_the_write"),
    (Flaw::AdmitsWhileStopped, "a_stopped_store_rejects"),
    (Flaw::ComparesAsDoubles, "names_and_tokens_of_any_size_are_kept"),
    (Flaw::FoldsNames, "names_and_tokens_of_any_size_are_kept"),
];

struct Register {
    flaw: Flaw,
    contents: Mutex<Contents>,
}

#[derive(Default)]
struct Contents {
    marks: BTreeMap<(Name, Name), Token>,
    values: BTreeMap<Name, String>,
    stopped: bool,
}

impl Register {
    async fn new(flaw: Flaw) -> Self {
        Self { flaw, contents: Mutex::default() }
    }

    /// The key of the mark.
    fn key(&self, resource: &Name, lock: &Name) -> (Name, Name) {
        let all: Name = "all".parse().unwrap();
        let folded = |name: &Name| name.as_str().to_lowercase().parse().unwrap();
        match self.flaw {
            Flaw::SharesMarksOfLocks => (resource.clone(), all),
            Flaw::SharesMarksOfResources => (all, lock.clone()),
            Flaw::FoldsNames => (folded(resource), folded(lock)),
            _ => (resource.clone(), lock.clone()),
        }
    }

    fn check(
        &self,
        resource: &Name,
        lock: &Name,
        token: &FencingToken,
        seen: Option<Token>,
    ) -> Result<(), FenceError> {
        let lock = if self.flaw == Flaw::IgnoresTheLock { token.lock() } else { lock };
        let as_double = |token: Token| token.get() as f64;
        match (self.flaw, seen) {
            (Flaw::RejectsAnEqualToken, Some(seen)) if token.token() == seen => {
                Err(FenceError::stale(resource, token, seen))
            }
            (Flaw::AdmitsALowerToken | Flaw::LowersTheMark, _) => {
                check_token(resource, lock, token, None)
            }
            (Flaw::ComparesAsDoubles, Some(seen))
                if as_double(token.token()) >= as_double(seen) =>
            {
                check_token(resource, lock, token, None)
            }
            _ => check_token(resource, lock, token, seen),
        }
    }
}

#[async_trait]
impl FencedRegister for Register {
    async fn write(
        &self,
        resource: &Name,
        lock: &Name,
        token: &FencingToken,
        value: &str,
    ) -> Result<(), FenceError> {
        let key = self.key(resource, lock);
        {
            let mut contents = self.contents.lock().unwrap();
            if contents.stopped && self.flaw != Flaw::AdmitsWhileStopped {
                return Err(FenceError::store("test", "it is stopped"));
            }
            let seen = contents.marks.get(&key).copied();
            let checked = self.check(resource, lock, token, seen);
            if self.flaw == Flaw::WritesWhatItRejects {
                contents.values.insert(resource.clone(), value.to_owned());
            }
            checked?;
            let raised = match (self.flaw, seen) {
                (Flaw::NeverRaisesTheMark, Some(seen)) => seen,
                (Flaw::AdmitsALowerToken, Some(seen)) => seen.max(token.token()),
                _ => token.token(),
            };
            contents.marks.insert(key, raised);
            if self.flaw != Flaw::ChecksBeforeItWrites {
                contents.values.insert(resource.clone(), value.to_owned());
                return Ok(());
            }
        }
        // A lower token, admitted first, writes last.
        let pause = std::time::Duration::from_millis(20 - ((token.token().get() - 1) % 8) * 2);
        tokio::time::sleep(pause).await;
        self.contents.lock().unwrap().values.insert(resource.clone(), value.to_owned());
        Ok(())
    }

    async fn read(&self, resource: &Name) -> Option<String> {
        self.contents.lock().unwrap().values.get(resource).cloned()
    }

    async fn marks(&self) -> Result<Vec<FenceMark>, FenceError> {
        let contents = self.contents.lock().unwrap();
        if contents.stopped {
            return Err(FenceError::store("test", "it is stopped"));
        }
        let marks = contents.marks.iter();
        let marks = marks.map(|((resource, lock), token)| {
            FenceMark::new(resource.clone(), lock.clone(), *token)
        });
        Ok(marks.collect())
    }

    async fn restart(&self) {
        let mut contents = self.contents.lock().unwrap();
        contents.stopped = false;
        if self.flaw == Flaw::ForgetsAtARestart {
            contents.marks.clear();
        }
    }

    async fn stop(&self) {
        self.contents.lock().unwrap().stopped = true;
    }
}

fence_suite!(Register::new(Flaw::None));

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_flaw_is_caught_by_its_law() {
    for (flaw, law) in CAUGHT_BY {
        let register = Arc::new(Register::new(*flaw).await);
        let outcome = AssertUnwindSafe(check(law, register)).catch_unwind().await;
        assert!(outcome.is_err(), "{law} holds although the register {flaw:?}");
    }
}

#[test]
fn each_law_has_a_flaw_that_it_catches() {
    for (law, _) in LAWS {
        assert!(CAUGHT_BY.iter().any(|(_, caught_by)| caught_by == law), "{law}");
    }
}
