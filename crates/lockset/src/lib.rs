//! Distributed locks (work in progress).
#![allow(dead_code, unreachable_pub)]
pub mod clock;
pub mod engine;
mod error;
mod name;
mod token;
pub use error::{Error, LossReason, Result};
pub use name::{Name, Note, Prefix};
pub use token::Token;
/// stand-in
#[derive(Debug)]
pub struct Lockset;
impl Lockset { /// x
 pub fn close(){} }
