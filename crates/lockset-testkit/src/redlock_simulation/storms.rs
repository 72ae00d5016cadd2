//! What happens to nodes and clients now and then, whatever they are doing.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rand::RngExt;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;

use super::home::{Copy, Home, repeat};
use super::{Client, World, span};

impl World {
    pub(super) async fn storms(self: Arc<Self>, clients: Vec<Arc<Client>>, mut random: SmallRng) {
        while !self.over.load(Ordering::Relaxed) {
            tokio::time::sleep(span(&mut random, self.ttl / 2)).await;
            let home = self.homes[random.random_range(0..self.homes.len())].clone();
            let client = &clients[random.random_range(0..clients.len())];
            match random.random_range(0..12) {
                0 => tokio::time::advance(span(&mut random, self.ttl * 2)).await,
                1 | 2 => home.freeze(span(&mut random, self.ttl * 2)),
                3 | 4 => self.cut_off(client, &mut random),
                5 => self.pause(client, &mut random).await,
                6 => home.echo(&mut random).await,
                7 if self.jumps => home.jump_forward().await,
                8 | 9 if self.jumps => self.jump_together(&mut random).await,
                10 if self.jumps => home.jump_back(span(&mut random, self.ttl * 2)),
                11 if self.forgets => home.restart(),
                _ => {}
            }
        }
    }

    /// One client does not reach some of the nodes, which the others do.
    fn cut_off(&self, client: &Client, random: &mut SmallRng) {
        let until = self.clock.now() + span(random, self.ttl * 2);
        for home in self.some_homes(random, self.homes.len() / 2 + 1) {
            let node = self.homes.iter().position(|other| Arc::ptr_eq(other, &home));
            client.cut(node.unwrap(), until);
        }
    }

    /// One client does nothing for a while, at any moment: between two rounds of requests too.
    async fn pause(&self, client: &Client, random: &mut SmallRng) {
        client.ice.freeze();
        tokio::time::sleep(span(random, self.ttl / 2)).await;
        // One that stopped meanwhile stays where it is.
        if !client.is_stopped() {
            client.ice.thaw();
        }
    }

    /// A wrong time reaches several nodes at once, so that a holder has lost its quorum before it
    /// knows; and when others have been there, and perhaps lost it likewise, its old requests come
    /// once more.
    async fn jump_together(&self, random: &mut SmallRng) {
        let homes = self.some_homes(random, self.homes.len() / 2 + 1);
        let old: Vec<Copy> = homes.iter().filter_map(|home| home.copies().pop()).collect();
        for home in &homes {
            home.jump_forward().await;
        }
        tokio::time::sleep(span(random, self.ttl / 5)).await;
        if random.random_bool(0.5) {
            for home in &homes {
                home.jump_forward().await;
            }
        }
        for copy in &old {
            repeat(copy).await;
        }
    }

    /// So many of the nodes at most, and mostly so many.
    fn some_homes(&self, random: &mut SmallRng, most: usize) -> Vec<Arc<Home>> {
        let mut homes = self.homes.clone();
        homes.shuffle(random);
        homes.truncate(if random.random_bool(0.7) { most } else { random.random_range(1..=most) });
        homes
    }
}
