//! Random disturbances of nodes and clients while a run goes on.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rand::RngExt;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;

use super::node::{RequestCopy, SimNode, repeat};
use super::{Client, World, span};

impl World {
    pub(super) async fn disturb(self: Arc<Self>, clients: Vec<Arc<Client>>, mut random: SmallRng) {
        while !self.over.load(Ordering::Relaxed) {
            tokio::time::sleep(span(&mut random, self.ttl / 2)).await;
            let node = self.nodes[random.random_range(0..self.nodes.len())].clone();
            let client = &clients[random.random_range(0..clients.len())];
            match random.random_range(0..12) {
                0 => tokio::time::advance(span(&mut random, self.ttl * 2)).await,
                1 | 2 => node.freeze(span(&mut random, self.ttl * 2)),
                3 | 4 => self.cut_off(client, &mut random),
                5 => self.pause(client, &mut random).await,
                6 => node.repeat_a_request(&mut random).await,
                7 if self.jumps => node.jump_forward().await,
                8 | 9 if self.jumps => self.jump_together(&mut random).await,
                10 if self.jumps => node.jump_back(span(&mut random, self.ttl * 2)),
                11 if self.forgets => node.restart(),
                _ => {}
            }
        }
    }

    /// Cuts one client off from some of the nodes.
    fn cut_off(&self, client: &Client, random: &mut SmallRng) {
        let until = self.clock.now() + span(random, self.ttl * 2);
        for node in self.some_nodes(random, self.nodes.len() / 2 + 1) {
            let node = self.nodes.iter().position(|other| Arc::ptr_eq(other, &node));
            client.cut(node.unwrap(), until);
        }
    }

    /// Pauses one client for a while, at any moment, also between two rounds of requests.
    async fn pause(&self, client: &Client, random: &mut SmallRng) {
        client.switch.freeze();
        tokio::time::sleep(span(random, self.ttl / 2)).await;
        // A client that crashed meanwhile stays frozen.
        if !client.is_stopped() {
            client.switch.thaw();
        }
    }

    /// The clocks of several nodes jump at once, so that a holder loses its quorum without
    /// noticing. After others have acquired the lock, and perhaps lost it in the same way, its old
    /// requests arrive again.
    async fn jump_together(&self, random: &mut SmallRng) {
        let nodes = self.some_nodes(random, self.nodes.len() / 2 + 1);
        let old: Vec<RequestCopy> = nodes.iter().filter_map(|node| node.copies().pop()).collect();
        for node in &nodes {
            node.jump_forward().await;
        }
        tokio::time::sleep(span(random, self.ttl / 5)).await;
        if random.random_bool(0.5) {
            for node in &nodes {
                node.jump_forward().await;
            }
        }
        for copy in &old {
            repeat(copy).await;
        }
    }

    /// At most `most` of the nodes, usually exactly `most`.
    fn some_nodes(&self, random: &mut SmallRng, most: usize) -> Vec<Arc<SimNode>> {
        let mut nodes = self.nodes.clone();
        nodes.shuffle(random);
        nodes.truncate(if random.random_bool(0.7) { most } else { random.random_range(1..=most) });
        nodes
    }
}
