//! Batching: requests that are made while another is in flight are sent together.
//!
//! A request that finds nothing in flight is sent alone, at once. Requests that are made while it
//! is in flight are queued, and sent together when it has returned, by a task on the transport's
//! own runtime. A batch costs the servers little more than the work for each request.
//!
//! The callers of a large batch get their replies together, and most have their next request ready
//! at the same time. So the task looks whether the queue still grows before it sends the next one.
//! Where the server has a core of its own, two halves are in flight: one is made while the other is
//! executed.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::sync;

/// How long queued requests wait for a request that was sent alone: the future that sent it may not
/// be polled while its caller does something else.
const MAX_SOLO_WAIT: Duration = Duration::from_millis(50);
/// After a batch of at least this size, the next one is given time to grow as large.
const LARGE: usize = 8;
/// So often in a row the queue must be seen not to grow. Each look lets all other tasks run.
const LOOKS: usize = 8;
/// A queue of at least this size is sent in two halves, if two batches may be in flight.
const WORTH_HALVING: usize = 32;

/// Sends requests, one or many at a time.
pub(crate) trait Transport: Send + Sync + Sized + 'static {
    type Request: Clone + Send + Sync;
    type Answer: Send;
    type Failed: Clone + Send;

    fn batch(&self) -> &Batcher<Self>;

    /// The runtime of the task that sends batches.
    fn runtime(&self) -> &Handle;

    /// How many batches may be in flight at once.
    fn max_in_flight(&self) -> usize {
        1
    }

    /// Whether a request can be sent together with these.
    fn goes_with(&self, batch: &[Self::Request], request: &Self::Request) -> bool;

    /// Sends requests together. Returns one reply for each, in their order.
    fn send(
        &self,
        requests: Vec<Self::Request>,
    ) -> impl Future<Output = Result<Vec<Self::Answer>, Self::Failed>> + Send;

    /// The failure of the requests that were not sent yet, if the server does not reply: each of
    /// them would wait as long again.
    fn silence(failed: &Self::Failed) -> Option<Self::Failed>;
}

type BatchResult<C> = Result<<C as Transport>::Answer, <C as Transport>::Failed>;
type ReplySender<C> = oneshot::Sender<BatchResult<C>>;
type QueuedRequest<C> = (<C as Transport>::Request, ReplySender<C>);

/// The requests that wait for the one in flight.
pub(crate) struct Batcher<C: Transport> {
    queue: Mutex<RequestQueue<C>>,
}

struct RequestQueue<C: Transport> {
    in_flight: InFlightSend,
    turns: u64,
    /// A receiver may call back, so no sender is used or dropped while this is locked.
    waiting: Vec<QueuedRequest<C>>,
}

enum InFlightSend {
    Nothing,
    /// One request was sent alone: the turn with this number, which began then.
    Alone(u64, Instant),
    /// Batches are sent by this many tasks.
    Together(usize),
}

impl InFlightSend {
    fn is_turn(&self, number: u64) -> bool {
        matches!(self, Self::Alone(it, _) if *it == number)
    }
}

impl<C: Transport> Default for Batcher<C> {
    fn default() -> Self {
        let queue =
            RequestQueue { in_flight: InFlightSend::Nothing, turns: 0, waiting: Vec::new() };
        Self { queue: Mutex::new(queue) }
    }
}

impl<C: Transport> std::fmt::Debug for Batcher<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Batcher").finish_non_exhaustive()
    }
}

/// How a request is sent.
pub(crate) enum Entered<'c, C: Transport> {
    /// Alone, now.
    Alone(SingleTurn<'c, C>),
    /// Together with others, later.
    Behind(Behind<'c, C>),
}

impl<C: Transport> Batcher<C> {
    pub(crate) fn enter<'c>(transport: &'c Arc<C>, request: &C::Request) -> Entered<'c, C> {
        let now = Instant::now();
        let mut queue = transport.batch().queue();
        let alone = match queue.in_flight {
            InFlightSend::Nothing => {
                queue.turns += 1;
                let number = queue.turns;
                queue.in_flight = InFlightSend::Alone(number, now);
                return Entered::Alone(SingleTurn { transport, number });
            }
            InFlightSend::Alone(number, since) => Some((number, since + MAX_SOLO_WAIT)),
            InFlightSend::Together(_) => None,
        };
        let (sender, answer) = oneshot::channel();
        queue.waiting.push((request.clone(), sender));
        drop(queue);
        let alone = match alone {
            // The requests queued before it were dropped before that.
            Some((number, until)) if until <= now => {
                send_queued_instead_of(transport, number);
                None
            }
            alone => alone,
        };
        Entered::Behind(Behind { transport, alone, answer })
    }

    /// Fails the queued requests, if the request in flight failed because the server does not
    /// reply.
    fn on_failure(&self, failed: &C::Failed, is_in_flight: impl FnOnce(&InFlightSend) -> bool) {
        let mut queue = self.queue();
        if C::silence(failed).is_none() || !is_in_flight(&queue.in_flight) {
            return;
        }
        let waiting = std::mem::take(&mut queue.waiting);
        drop(queue);
        for (_, sender) in waiting {
            if let Some(silence) = C::silence(failed) {
                let _ = sender.send(Err(silence));
            }
        }
    }

    fn queue(&self) -> MutexGuard<'_, RequestQueue<C>> {
        sync::lock(&self.queue)
    }
}

/// The requests to send together next.
struct NextBatch<C: Transport> {
    requests: Vec<C::Request>,
    senders: Vec<ReplySender<C>>,
    /// Dropped requests. They may have a tombstone by now, so nothing is sent for them.
    dropped: Vec<QueuedRequest<C>>,
}

impl<C: Transport> RequestQueue<C> {
    /// Takes at most `most` requests that can be sent together now. The others keep their order.
    fn take_batch(&mut self, transport: &C, most: usize) -> NextBatch<C> {
        let (requests, senders) = (Vec::with_capacity(most), Vec::with_capacity(most));
        let mut batch = NextBatch { requests, senders, dropped: Vec::new() };
        let mut kept = Vec::new();
        for (request, sender) in self.waiting.drain(..) {
            if batch.requests.len() == most {
                kept.push((request, sender));
            } else if sender.is_closed() {
                batch.dropped.push((request, sender));
            } else if transport.goes_with(&batch.requests, &request) {
                batch.requests.push(request);
                batch.senders.push(sender);
            } else {
                kept.push((request, sender));
            }
        }
        self.waiting = kept;
        batch
    }
}

/// A request that is sent alone. The requests queued meanwhile are sent when it is dropped.
pub(crate) struct SingleTurn<'c, C: Transport> {
    transport: &'c Arc<C>,
    number: u64,
}

impl<C: Transport> SingleTurn<'_, C> {
    /// Fails the queued requests, if this one failed because the server does not reply.
    #[cfg(any(feature = "etcd", test))]
    pub(crate) fn on_failure(&self, failed: &C::Failed) {
        self.transport.batch().on_failure(failed, |in_flight| in_flight.is_turn(self.number));
    }
}

impl<C: Transport> Drop for SingleTurn<'_, C> {
    fn drop(&mut self) {
        let mut queue = self.transport.batch().queue();
        if queue.waiting.is_empty() && queue.in_flight.is_turn(self.number) {
            queue.in_flight = InFlightSend::Nothing;
            return;
        }
        drop(queue);
        send_queued_instead_of(self.transport, self.number);
    }
}

/// A request that is queued behind the one in flight.
pub(crate) struct Behind<'c, C: Transport> {
    transport: &'c Arc<C>,
    /// The turn of a request sent alone that it waits for, and until when.
    alone: Option<(u64, Instant)>,
    answer: oneshot::Receiver<BatchResult<C>>,
}

impl<C: Transport> Behind<'_, C> {
    /// The reply; `None` if the transport's runtime ended.
    pub(crate) async fn answer(mut self) -> Option<BatchResult<C>> {
        if let Some((number, until)) = self.alone {
            // Boxed, because it is large and not needed behind a batch.
            if let Ok(answer) = Box::pin(tokio::time::timeout_at(until, &mut self.answer)).await {
                return answer.ok();
            }
            send_queued_instead_of(self.transport, number);
        }
        self.answer.await.ok()
    }
}

/// Sends the queued requests, if the turn with this number, of a request sent alone, is still the
/// one in flight.
fn send_queued_instead_of<C: Transport>(transport: &Arc<C>, number: u64) {
    let mut queue = transport.batch().queue();
    if !queue.in_flight.is_turn(number) {
        return;
    }
    queue.in_flight = InFlightSend::Together(1);
    drop(queue);
    transport
        .runtime()
        .spawn(send_queued(BatchTask { transport: transport.clone(), is_done: false }));
}

/// A task that sends batches. If it ends early, because its runtime does, the queued requests are
/// dropped and their callers return.
struct BatchTask<C: Transport> {
    transport: Arc<C>,
    is_done: bool,
}

impl<C: Transport> Drop for BatchTask<C> {
    fn drop(&mut self) {
        if !self.is_done {
            let mut queue = self.transport.batch().queue();
            queue.in_flight = InFlightSend::Nothing;
            let waiting = std::mem::take(&mut queue.waiting);
            drop(queue);
            drop(waiting);
        }
    }
}

/// Sends the queued requests in batches until the queue is empty.
async fn send_queued<C: Transport>(mut task: BatchTask<C>) {
    let transport = task.transport.clone();
    loop {
        let Some(NextBatch { requests, senders, dropped }) = next_batch(&transport) else {
            task.is_done = true;
            return;
        };
        drop(dropped);
        if requests.is_empty() {
            continue;
        }
        let size = requests.len();
        match transport.send(requests).await {
            Ok(answers) => senders.into_iter().zip(answers).for_each(|(sender, answer)| {
                let _ = sender.send(Ok(answer));
            }),
            Err(failed) => {
                transport.batch().on_failure(&failed, |in_flight| {
                    matches!(in_flight, InFlightSend::Together(_))
                });
                senders.into_iter().for_each(|sender| {
                    let _ = sender.send(Err(failed.clone()));
                });
            }
        }
        // The callers that just got a reply may have their next request ready.
        tokio::task::yield_now().await;
        if size >= LARGE {
            gather(&*transport, size).await;
        }
    }
}

/// The requests to send now; a second task gets half of many. `None` if none are queued: then the
/// caller is no longer one of the tasks that send batches.
fn next_batch<C: Transport>(transport: &Arc<C>) -> Option<NextBatch<C>> {
    let mut queue = transport.batch().queue();
    let tasks = if let InFlightSend::Together(tasks) = queue.in_flight { tasks } else { 0 };
    let queued = queue.waiting.len();
    if queued == 0 {
        queue.in_flight = match tasks {
            0 | 1 => InFlightSend::Nothing,
            others => InFlightSend::Together(others - 1),
        };
        return None;
    }
    let halves = queued >= WORTH_HALVING && tasks < transport.max_in_flight();
    if !halves {
        return Some(queue.take_batch(&**transport, queued));
    }
    queue.in_flight = InFlightSend::Together(tasks + 1);
    let batch = queue.take_batch(&**transport, queued.div_ceil(2));
    drop(queue);
    let second = BatchTask { transport: transport.clone(), is_done: false };
    transport.runtime().spawn(send_queued(second));
    Some(batch)
}

/// Waits while the queue grows, until it is as long as the last batch.
async fn gather<C: Transport>(transport: &C, last: usize) {
    let (mut before, mut unchanged) = (0, 0);
    while unchanged < LOOKS {
        let queued = transport.batch().queue().waiting.len();
        if queued >= last {
            return;
        }
        unchanged = if queued > before { 0 } else { unchanged + 1 };
        before = queued;
        tokio::task::yield_now().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends odd numbers together, or even ones, and records the batches.
    struct TestTransport {
        batch: Batcher<Self>,
        runtime: Handle,
        left: Mutex<Vec<Vec<u32>>>,
        is_silent: fn(&[u32]) -> bool,
        max_in_flight: usize,
    }

    impl TestTransport {
        fn new(is_silent: fn(&[u32]) -> bool) -> Arc<Self> {
            Arc::new(Self::with_in_flight(1, is_silent))
        }

        fn with_in_flight(max_in_flight: usize, is_silent: fn(&[u32]) -> bool) -> Self {
            let (batch, runtime) = (Batcher::default(), Handle::current());
            Self { batch, runtime, left: Mutex::default(), is_silent, max_in_flight }
        }

        async fn request(self: &Arc<Self>, number: u32) -> Option<BatchResult<Self>> {
            match Batcher::enter(self, &number) {
                Entered::Alone(turn) => {
                    let sent = self.send(vec![number]).await;
                    Some(
                        sent.inspect_err(|failed| turn.on_failure(failed))
                            .map(|mut it| it.remove(0)),
                    )
                }
                Entered::Behind(behind) => behind.answer().await,
            }
        }

        fn left(&self) -> Vec<Vec<u32>> {
            sync::lock(&self.left).clone()
        }
    }

    impl Transport for TestTransport {
        type Request = u32;
        type Answer = u32;
        type Failed = &'static str;

        fn batch(&self) -> &Batcher<Self> {
            &self.batch
        }

        fn runtime(&self) -> &Handle {
            &self.runtime
        }

        fn max_in_flight(&self) -> usize {
            self.max_in_flight
        }

        fn goes_with(&self, batch: &[u32], request: &u32) -> bool {
            batch.first().is_none_or(|first| first % 2 == request % 2)
        }

        async fn send(&self, requests: Vec<u32>) -> Result<Vec<u32>, &'static str> {
            sync::lock(&self.left).push(requests.clone());
            tokio::time::sleep(Duration::from_millis(10)).await;
            if (self.is_silent)(&requests) { Err("silent") } else { Ok(requests) }
        }

        fn silence(_: &&'static str) -> Option<&'static str> {
            Some("not sent")
        }
    }

    #[tokio::test(start_paused = true)]
    async fn requests_made_meanwhile_are_sent_together_and_each_gets_its_own_reply() {
        let transport = TestTransport::new(|_| false);
        let all = [1, 2, 3, 4, 5].map(|number| transport.request(number));
        let answers = futures_util::future::join_all(all).await;
        assert_eq!(answers, [1, 2, 3, 4, 5].map(|number| Some(Ok(number))));
        assert_eq!(transport.left(), [&[1][..], &[2, 4], &[3, 5]]);
        transport.request(6).await;
        assert_eq!(transport.left().last(), Some(&vec![6]), "nothing is in flight, yet it waited");
    }

    fn sizes(transport: &TestTransport) -> Vec<usize> {
        transport.left().iter().map(Vec::len).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_queue_is_sent_in_halves_only_where_two_may_be_in_flight() {
        for (max_in_flight, expected, round_trips) in
            [(1, vec![1, 40], 2), (2, vec![1, 20, 20], 2), (2, vec![1, 31], 2)]
        {
            let transport = Arc::new(TestTransport::with_in_flight(max_in_flight, |_| false));
            let start = Instant::now();
            let count = expected.iter().sum::<usize>() as u32;
            let all = (0..count).map(|number| transport.request(2 * number));
            let answers = futures_util::future::join_all(all).await;
            assert!((0..count).all(|number| answers[number as usize] == Some(Ok(2 * number))));
            assert_eq!(sizes(&transport), expected);
            assert_eq!(start.elapsed(), Duration::from_millis(10) * round_trips);
            transport.request(1).await;
            assert_eq!(
                transport.left().last(),
                Some(&vec![1]),
                "nothing is in flight, yet it waited"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_next_batch_waits_for_callers_that_come_back_one_by_one() {
        let transport = TestTransport::new(|_| false);
        let all = (0..17_u32).map(|number| {
            let transport = transport.clone();
            tokio::spawn(async move {
                transport.request(2 * number).await;
                for _ in 0..number % LOOKS as u32 {
                    tokio::task::yield_now().await;
                }
                transport.request(2 * number).await;
            })
        });
        for caller in futures_util::future::join_all(all).await {
            caller.unwrap();
        }
        // The first was alone, and the others had been sent when it came back.
        assert_eq!(sizes(&transport), [1, 16, 17]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_is_not_polled_is_not_waited_for_and_does_no_harm_later() {
        let transport = TestTransport::new(|_| false);
        let mut resting = Box::pin(transport.request(1));
        assert!(futures_util::poll!(resting.as_mut()).is_pending());
        let before = tokio::time::Instant::now();
        let others = [3, 5].map(|number| transport.request(number));
        let answers = futures_util::future::join_all(others).await;
        assert_eq!(answers, [Some(Ok(3)), Some(Ok(5))]);
        assert!(before.elapsed() < 2 * MAX_SOLO_WAIT, "{:?}", before.elapsed());
        // It ends while another request is in flight alone, which is still waited for.
        tokio::time::sleep(MAX_SOLO_WAIT).await;
        let mut second = Box::pin(transport.request(7));
        assert!(futures_util::poll!(second.as_mut()).is_pending());
        assert_eq!(resting.await, Some(Ok(1)));
        let (seven, nine) = tokio::join!(second, transport.request(9));
        assert_eq!((seven, nine), (Some(Ok(7)), Some(Ok(9))));
        assert_eq!(transport.left(), [&[1][..], &[3, 5], &[7], &[9]]);
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_sent_for_dropped_requests_and_a_dropped_turn_is_passed_on() {
        let transport = TestTransport::new(|_| false);
        let mut alone = Box::pin(transport.request(1));
        assert!(futures_util::poll!(alone.as_mut()).is_pending());
        let mut impatient = Box::pin(transport.request(3));
        assert!(futures_util::poll!(impatient.as_mut()).is_pending());
        let mut patient = Box::pin(transport.request(5));
        assert!(futures_util::poll!(patient.as_mut()).is_pending());
        drop((impatient, alone));
        assert_eq!(patient.await, Some(Ok(5)));
        assert_eq!(transport.left(), [[1], [5]]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_does_not_reply_is_waited_for_once() {
        let transport = TestTransport::new(|sent| sent.len() > 1);
        let all = [1, 3, 5, 2].map(|number| transport.request(number));
        let answers = futures_util::future::join_all(all).await;
        assert_eq!(answers, [Ok(1), Err("silent"), Err("silent"), Err("not sent")].map(Some));
        assert_eq!(transport.left(), [&[1][..], &[3, 5]]);
        let transport = TestTransport::new(|sent| sent == [1]);
        let answers = tokio::join!(transport.request(1), transport.request(2));
        assert_eq!(answers, (Some(Err("silent")), Some(Err("not sent"))));
        assert_eq!(transport.request(3).await, Some(Ok(3)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_timeout_of_an_overtaken_request_fails_no_other() {
        let transport = TestTransport::new(|sent| sent == [1]);
        let mut resting = Box::pin(transport.request(1));
        assert!(futures_util::poll!(resting.as_mut()).is_pending());
        tokio::time::sleep(MAX_SOLO_WAIT).await;
        let mut second = Box::pin(transport.request(2));
        assert!(futures_util::poll!(second.as_mut()).is_pending());
        tokio::task::yield_now().await;
        let mut third = Box::pin(transport.request(3));
        assert!(futures_util::poll!(third.as_mut()).is_pending());
        assert_eq!(resting.await, Some(Err("silent")));
        assert_eq!(tokio::join!(second, third), (Some(Ok(2)), Some(Ok(3))));
    }

    #[tokio::test(start_paused = true)]
    async fn short_timeouts_are_not_stalled_for_ever_by_a_request_that_is_not_polled() {
        let transport = TestTransport::new(|_| false);
        let mut resting = Box::pin(transport.request(1));
        assert!(futures_util::poll!(resting.as_mut()).is_pending());
        let soon = |number| tokio::time::timeout(MAX_SOLO_WAIT / 2, transport.request(number));
        let answers = [soon(3).await.is_ok(), soon(5).await.is_ok(), soon(7).await.is_ok()];
        assert_eq!(answers, [false, false, true]);
        assert_eq!(transport.left(), [[1], [7]], "the others were dropped");
    }

    #[test]
    fn no_request_waits_for_a_transport_whose_runtime_ended() {
        let new = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (theirs, ours) = (new(), new());
        let transport = theirs.block_on(async { TestTransport::new(|_| false) });
        drop(theirs);
        let answers =
            ours.block_on(async { tokio::join!(transport.request(1), transport.request(3)) });
        assert_eq!(answers, (Some(Ok(1)), None));
    }
}
