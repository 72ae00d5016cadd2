//! Watches: one stream for all of a client, made again when it was cut.
//!
//! A watch begins with whatever comes after it was made, never with an older revision: for those a
//! server looks only ten times a second. So whoever watches first waits for [`News::Fresh`], and
//! *then* reads. After a cut every watch is fresh again, and everybody reads again.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::StreamExt;
use tokio::sync::mpsc;

use super::keys::Keys;
use super::link::{Failed, Link, What};
use super::rpc::event::EventType;
use super::rpc::{
    KeyValue, WatchCancelRequest, WatchCreateRequest, WatchRequest, WatchResponse, watch_request,
};
use crate::engine::common::watch::receiver_stream;
use crate::error::{Error, Result};

const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// What a watch tells.
#[derive(Debug)]
pub(super) enum News {
    /// The watch stands from here on; what happened before must be read.
    Fresh,
    /// This key was written, or deleted.
    Changed { key: Vec<u8>, is_deleted: bool },
    /// There will be no news.
    Refused(Error),
}

/// Where watches are asked for.
#[derive(Clone, Debug)]
pub(super) struct Stand {
    orders: mpsc::UnboundedSender<Order>,
}

/// A watch, until it is dropped.
#[derive(Debug)]
pub(super) struct Reader {
    news: mpsc::UnboundedReceiver<News>,
    keys: Keys,
    orders: mpsc::UnboundedSender<Order>,
}

impl Reader {
    /// The next news; `None` if the client was closed.
    pub(super) async fn next(&mut self) -> Option<News> {
        self.news.recv().await
    }

    pub(super) fn keys(&self) -> &Keys {
        &self.keys
    }

    /// Waits until it is worth to look again at what is watched: the watch is fresh, the one key
    /// was changed, or one of several was deleted.
    pub(super) async fn worth_a_look(&mut self) -> Result<()> {
        loop {
            let mut news = self.news.recv().await.ok_or(Error::Closed)?;
            let mut is_worth = false;
            // What came meanwhile is seen by the same look.
            loop {
                is_worth |= match news {
                    News::Fresh => true,
                    News::Changed { is_deleted, .. } => is_deleted || self.keys.end.is_empty(),
                    News::Refused(error) => return Err(error),
                };
                match self.news.try_recv() {
                    Ok(more) => news = more,
                    Err(_) => break,
                }
            }
            if is_worth {
                return Ok(());
            }
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.news.close();
        // Without a stand nothing needs to be tidied.
        let _ = self.orders.send(Order::Tidy(self.keys.clone()));
    }
}

#[derive(Debug)]
enum Order {
    Watch(Keys, mpsc::UnboundedSender<News>),
    /// Somebody who watched these keys left.
    Tidy(Keys),
}

impl Stand {
    /// Must be called inside the runtime of the link. The task ends with the link.
    pub(super) fn open(link: &Arc<Link>) -> (Self, tokio::task::AbortHandle) {
        let (orders, waiting) = mpsc::unbounded_channel();
        let task = tokio::spawn(serve(Arc::downgrade(link), waiting)).abort_handle();
        (Self { orders }, task)
    }

    pub(super) fn watch(&self, keys: Keys) -> Reader {
        let (tell, news) = mpsc::unbounded_channel();
        // If the client was closed, the reader finds out by its end.
        let _ = self.orders.send(Order::Watch(keys.clone(), tell));
        Reader { news, keys, orders: self.orders.clone() }
    }
}

/// One watch at the server, and everybody who reads it.
#[derive(Debug)]
struct Topic {
    id: i64,
    is_fresh: bool,
    readers: Vec<mpsc::UnboundedSender<News>>,
}

impl Topic {
    /// Tells everybody who reads it; it is not watched any more.
    fn refuse(self, failed: &Failed) {
        for reader in self.readers {
            let _ = reader.send(News::Refused(failed.again().into_error()));
        }
    }
}

#[derive(Debug, Default)]
struct Topics {
    by_keys: HashMap<Keys, Topic>,
    by_id: HashMap<i64, Keys>,
    last_id: i64,
    /// The watches that were asked for and not answered yet, in their order; also those that nobody
    /// wants any more.
    unanswered: VecDeque<i64>,
}

async fn serve(link: Weak<Link>, mut orders: mpsc::UnboundedReceiver<Order>) {
    let mut topics = Topics::default();
    let mut pause = PAUSES.0;
    loop {
        while topics.by_keys.is_empty() {
            match orders.recv().await {
                Some(order) => drop(topics.take(order)),
                None => return,
            }
        }
        let Some(strong) = link.upgrade() else { return };
        match listen(&strong, &mut topics, &mut orders).await {
            Ended::Closed => return,
            Ended::Cut { worked: true } => pause = PAUSES.0,
            Ended::Cut { worked: false } => pause = (pause * 2).min(PAUSES.1),
            Ended::Refused(error) => topics.refuse(&error),
        }
        drop(strong);
        tokio::time::sleep(pause).await;
    }
}

enum Ended {
    Closed,
    Cut { worked: bool },
    Refused(Failed),
}

fn ended_by(failed: Failed, worked: bool) -> Ended {
    match failed.what {
        What::Refused => Ended::Refused(failed),
        _ => Ended::Cut { worked },
    }
}

/// Makes the stream with all watches there are, and hands out what it brings until it ends.
async fn listen(
    link: &Link,
    topics: &mut Topics,
    orders: &mut mpsc::UnboundedReceiver<Order>,
) -> Ended {
    let mut turns = link.turns();
    let (send, requests) = mpsc::unbounded_channel();
    topics.begin_again().into_iter().for_each(|request| drop(send.send(request)));
    let mut answers = match link.watch(receiver_stream(requests)).await {
        Ok(answers) => answers,
        Err(failed) if matches!(failed.what, What::Refused) => return Ended::Refused(failed),
        Err(_) => return Ended::Cut { worked: false },
    };
    let mut worked = false;
    loop {
        let request = tokio::select! {
            order = orders.recv() => match order {
                Some(order) => topics.take(order),
                None => return Ended::Closed,
            },
            answer = answers.next() => match answer {
                Some(Ok(answer)) if answer.canceled && answer.created => {
                    let failed = link.judge_refusal(&answer.cancel_reason);
                    // If not, it is a stream whose login expired, perhaps.
                    if let What::Refused = failed.what {
                        topics.refuse_one(answer.watch_id, &failed);
                        worked = true;
                    }
                    // Some servers read nothing more from a stream on which they refused something.
                    return Ended::Cut { worked };
                }
                Some(Ok(answer)) => {
                    worked = true;
                    topics.hand_out(answer)
                }
                Some(Err(status)) => return ended_by(link.judge_stream(&status), worked),
                None => return Ended::Cut { worked },
            },
            // Somebody found that this server does not answer.
            _ = turns.changed() => return Ended::Cut { worked },
        };
        if let Some(request) = request {
            // If the stream has ended, the answers end too.
            let _ = send.send(request);
        }
    }
}

impl Topics {
    /// What must be sent for this order.
    fn take(&mut self, order: Order) -> Option<WatchRequest> {
        match order {
            Order::Watch(keys, tell) => match self.by_keys.get_mut(&keys) {
                Some(topic) => {
                    if topic.is_fresh {
                        let _ = tell.send(News::Fresh);
                    }
                    topic.readers.push(tell);
                    None
                }
                None => {
                    let id = self.next_id();
                    let topic = Topic { id, is_fresh: false, readers: vec![tell] };
                    self.by_id.insert(id, keys.clone());
                    self.by_keys.insert(keys.clone(), topic);
                    Some(create(&keys, id))
                }
            },
            Order::Tidy(keys) => {
                let topic = self.by_keys.get_mut(&keys)?;
                topic.readers.retain(|reader| !reader.is_closed());
                let id = topic.id;
                if !topic.readers.is_empty() {
                    return None;
                }
                self.by_keys.remove(&keys);
                self.by_id.remove(&id);
                let cancel = WatchCancelRequest { watch_id: id };
                let request = watch_request::RequestUnion::CancelRequest(cancel);
                Some(WatchRequest { request_union: Some(request) })
            }
        }
    }

    /// The id of a watch that is asked for now.
    fn next_id(&mut self) -> i64 {
        self.last_id += 1;
        self.unanswered.push_back(self.last_id);
        self.last_id
    }

    /// New ids for a new stream: answers to old ones mean nothing any more.
    fn begin_again(&mut self) -> Vec<WatchRequest> {
        self.by_id.clear();
        self.unanswered.clear();
        let mut requests = Vec::with_capacity(self.by_keys.len());
        for (keys, topic) in &mut self.by_keys {
            self.last_id += 1;
            self.unanswered.push_back(self.last_id);
            topic.id = self.last_id;
            topic.is_fresh = false;
            self.by_id.insert(topic.id, keys.clone());
            requests.push(create(keys, topic.id));
        }
        requests
    }

    fn hand_out(&mut self, answer: WatchResponse) -> Option<WatchRequest> {
        if answer.created {
            self.unanswered.retain(|id| *id != answer.watch_id);
        }
        let keys = self.by_id.get(&answer.watch_id)?.clone();
        if answer.canceled {
            return self.canceled(answer, keys);
        }
        let topic = self.by_keys.get_mut(&keys)?;
        if answer.created {
            topic.is_fresh = true;
            topic.readers.iter().for_each(|reader| drop(reader.send(News::Fresh)));
        }
        for event in answer.events {
            let is_deleted = event.r#type() == EventType::Delete;
            let Some(KeyValue { key, .. }) = event.kv else { continue };
            for reader in &topic.readers {
                let _ = reader.send(News::Changed { key: key.clone(), is_deleted });
            }
        }
        None
    }

    /// Compacted (then the watch is made anew, from now on), or refused.
    fn canceled(&mut self, answer: WatchResponse, keys: Keys) -> Option<WatchRequest> {
        self.by_id.remove(&answer.watch_id);
        if answer.compact_revision == 0 && !answer.cancel_reason.is_empty() {
            let topic = self.by_keys.remove(&keys)?;
            let what = format!("a watch was refused: {}", answer.cancel_reason);
            for reader in topic.readers {
                let _ = reader.send(News::Refused(super::link::failed(what.clone(), false)));
            }
            return None;
        }
        let id = self.next_id();
        let topic = self.by_keys.get_mut(&keys)?;
        (topic.id, topic.is_fresh) = (id, false);
        self.by_id.insert(id, keys.clone());
        Some(create(&keys, id))
    }

    /// Some servers do not say which watch they refuse; but they answer in order.
    fn refuse_one(&mut self, watch_id: i64, failed: &Failed) {
        let place = self.unanswered.iter().position(|id| *id == watch_id).unwrap_or(0);
        let Some(id) = self.unanswered.remove(place) else { return };
        let topic = self.by_id.remove(&id).and_then(|keys| self.by_keys.remove(&keys));
        topic.into_iter().for_each(|topic| topic.refuse(failed));
    }

    fn refuse(&mut self, failed: &Failed) {
        self.by_id.clear();
        self.by_keys.drain().for_each(|(_, topic)| topic.refuse(failed));
    }
}

fn create(keys: &Keys, watch_id: i64) -> WatchRequest {
    let create = WatchCreateRequest {
        key: keys.first.clone(),
        range_end: keys.end.clone(),
        watch_id,
        ..WatchCreateRequest::default()
    };
    WatchRequest { request_union: Some(watch_request::RequestUnion::CreateRequest(create)) }
}
