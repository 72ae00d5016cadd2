//! Fenced Redlock as a model, explored in every order of events.
//!
//! The model is some independent nodes, each with a fence and a holder ([`Node`]), and attempts to
//! take one lock at a majority of them ([`Attempt`]). A request, once sent, may be executed at any
//! later moment or never, GRANTs also more than once; an attempt may act on any part of the answers
//! it got, at any later moment or never. [`explore`](crate::explorer::explore) visits every
//! state that can be reached and looks for broken promises ([`Violation`]). Each [`Rule`] can be
//! left out, and the search must then find what it is good for.
//!
//! There is no clock: the lease of any holder may end at any node at any moment. That covers more
//! than it seems to:
//!
//! * RELEASE does to a node what the end of a lease does, so it is not a step of its own.
//! * A lost request is one that is not executed; a lost answer is one that is not acted upon; a
//!   client that stops, or gives up, is one that does nothing more. None of them needs a step.
//! * A request that changes nothing (BUSY, LOST, a renewed ttl) leads to the state it began in.
//! * A waiter that queues at one node and asks the others when it is granted there is an attempt
//!   whose other GRANTs take long.
//!
//! What needs clocks is not here: whether two clients believe in the same moment that they hold.

mod node;
mod rules;
mod scenario;
mod steps;
mod world;

pub use node::{Node, NodeReplies, Value, Values};
pub use rules::{Rule, Rules};
pub use scenario::{Proposals, Restart, Scenario};
pub use steps::{Action, Step};
pub use world::{Attempt, Id, Phase, Violation, World};
