//! The order of requests within one process: lower tokens leave before greater ones begin.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use tokio::sync::watch;

use crate::name::Name;
use crate::sync;
use crate::token::Token;

/// The requests of each lock that are being admitted, wait or are in the handler.
#[derive(Debug)]
pub(super) struct TokenOrder {
    lanes: Mutex<Lanes>,
    max_waiting: usize,
}

#[derive(Debug, Default)]
struct Lanes {
    by_lock: HashMap<Name, OrderLane>,
    waiting: usize,
}

/// The requests of one lock. It is removed with the last of them.
#[derive(Debug)]
struct OrderLane {
    /// How many requests there are of each token.
    inside: BTreeMap<Token, usize>,
    /// The greatest token that the store has admitted of them.
    admitted: Option<Token>,
    /// The lowest token inside.
    lowest: watch::Sender<Token>,
}

/// That no more requests may wait.
#[derive(Debug)]
pub(super) struct Full;

impl TokenOrder {
    pub(super) fn new(max_waiting: usize) -> Self {
        Self { lanes: Mutex::default(), max_waiting }
    }

    /// Enters a request that the store has not admitted yet. A greater token that it has admitted
    /// is the error: without that, stale requests could keep a greater one waiting by their number.
    pub(super) fn enter(self: &Arc<Self>, lock: &Name, token: Token) -> Result<InOrder, Token> {
        let mut lanes = sync::lock(&self.lanes);
        let lane = lanes.by_lock.entry(lock.clone()).or_insert_with(|| OrderLane {
            inside: BTreeMap::new(),
            admitted: None,
            lowest: watch::Sender::new(token),
        });
        if let Some(seen) = lane.admitted.filter(|seen| *seen > token) {
            return Err(seen);
        }
        *lane.inside.entry(token).or_default() += 1;
        lane.update();
        Ok(InOrder { order: self.clone(), lock: lock.clone(), token, waits: false })
    }
}

impl OrderLane {
    fn update(&self) {
        let Some((&first, _)) = self.inside.first_key_value() else { return };
        self.lowest.send_if_modified(|lowest| std::mem::replace(lowest, first) != first);
    }
}

/// A request that has entered. It leaves when this is dropped.
#[derive(Debug)]
pub(super) struct InOrder {
    order: Arc<TokenOrder>,
    lock: Name,
    token: Token,
    waits: bool,
}

impl InOrder {
    /// Waits until all requests with lower tokens have left. The store has admitted this one, so it
    /// admits no lower one that enters from now on.
    pub(super) async fn wait(&mut self) -> Result<(), Full> {
        let mut lowest = {
            let mut lanes = sync::lock(&self.order.lanes);
            let Lanes { by_lock, waiting } = &mut *lanes;
            let Some(lane) = by_lock.get_mut(&self.lock) else { return Ok(()) };
            lane.admitted = lane.admitted.max(Some(self.token));
            if *lane.lowest.borrow() >= self.token {
                return Ok(());
            }
            if *waiting >= self.order.max_waiting {
                return Err(Full);
            }
            *waiting += 1;
            self.waits = true;
            lane.lowest.subscribe()
        };
        // The sender lives as long as this request is inside.
        let _ = lowest.wait_for(|lowest| *lowest >= self.token).await;
        sync::lock(&self.order.lanes).waiting -= 1;
        self.waits = false;
        Ok(())
    }
}

impl Drop for InOrder {
    fn drop(&mut self) {
        let mut lanes = sync::lock(&self.order.lanes);
        if self.waits {
            lanes.waiting -= 1;
        }
        let Some(lane) = lanes.by_lock.get_mut(&self.lock) else { return };
        if let Some(count) = lane.inside.get_mut(&self.token) {
            *count -= 1;
            if *count == 0 {
                lane.inside.remove(&self.token);
            }
        }
        if lane.inside.is_empty() {
            lanes.by_lock.remove(&self.lock);
        } else {
            lane.update();
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    fn order(max_waiting: usize) -> (Arc<TokenOrder>, Name) {
        (Arc::new(TokenOrder::new(max_waiting)), "orders/42".parse().unwrap())
    }

    fn assert_empty(order: &TokenOrder) {
        let lanes = sync::lock(&order.lanes);
        assert!(lanes.by_lock.is_empty() && lanes.waiting == 0, "{lanes:?}");
    }

    #[test]
    fn a_greater_token_waits_for_all_lower_ones_and_equal_ones_do_not_wait() {
        let (order, lock) = order(9);
        let enter = |token| order.enter(&lock, Token::new(token)).unwrap();
        let (mut first, mut second, mut equal) = (enter(1), enter(2), enter(2));
        let mut other = order.enter(&"orders/43".parse().unwrap(), Token::new(9)).unwrap();
        assert!(first.wait().now_or_never().is_some());
        assert!(other.wait().now_or_never().is_some());
        {
            let mut pending = Box::pin(second.wait());
            assert!(pending.as_mut().now_or_never().is_none());
            drop(first);
            assert!(pending.now_or_never().is_some());
        }
        assert!(equal.wait().now_or_never().is_some());
        let mut third = enter(3);
        drop(second);
        assert!(third.wait().now_or_never().is_none());
        drop(equal);
        let mut third_again = enter(3);
        assert!(third_again.wait().now_or_never().is_some());
        drop((third, third_again, other));
        assert_empty(&order);
    }

    #[test]
    fn a_token_below_an_admitted_one_does_not_enter() {
        let (order, lock) = order(9);
        let mut low = order.enter(&lock, Token::new(1)).unwrap();
        assert!(low.wait().now_or_never().is_some());
        let mut high = order.enter(&lock, Token::new(5)).unwrap();
        assert!(high.wait().now_or_never().is_none());
        assert_eq!(order.enter(&lock, Token::new(4)).unwrap_err(), Token::new(5));
        drop((low, high));
        assert_empty(&order);
        // Without requests, the store alone knows the mark.
        drop(order.enter(&lock, Token::new(4)).unwrap());
    }

    #[test]
    fn the_number_of_waiting_requests_is_bounded_over_all_locks() {
        let (order, lock) = order(1);
        let other: Name = "orders/43".parse().unwrap();
        let enter = |lock, token| order.enter(lock, Token::new(token)).unwrap();
        let (mut low, mut low_of_other) = (enter(&lock, 1), enter(&other, 1));
        assert!(low.wait().now_or_never().is_some());
        assert!(low_of_other.wait().now_or_never().is_some());
        let mut waiting = enter(&lock, 2);
        let mut pending = Box::pin(waiting.wait());
        assert!(pending.as_mut().now_or_never().is_none());
        let mut too_many = enter(&other, 2);
        assert!(matches!(too_many.wait().now_or_never(), Some(Err(Full))));
        // A request that is dropped while it waits makes room.
        drop(pending);
        drop(waiting);
        let mut next = enter(&other, 3);
        drop(too_many);
        assert!(next.wait().now_or_never().is_none());
        drop((low, low_of_other, next));
        assert_empty(&order);
    }
}
