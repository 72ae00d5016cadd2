//! What happens to nodes and clients now and then, whatever they are doing.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rand::RngExt;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;

use super::home::Home;
use super::{Client, World, span};

impl World {
    pub(super) async fn storms(self: Arc<Self>, clients: Vec<Arc<Client>>, mut random: SmallRng) {
        while !self.over.load(Ordering::Relaxed) {
            tokio::time::sleep(span(&mut random, self.ttl)).await;
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
        let until = self.clock.now() + span(random, self.ttl * 3);
        for home in self.some_homes(random, self.homes.len()) {
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
        for home in &homes {
            home.jump_forward().await;
        }
        for _ in 0..random.random_range(0..3) {
            tokio::time::sleep(span(random, self.ttl / 8)).await;
            let again = random.random_bool(0.5);
            for home in &homes {
                if again {
                    home.jump_forward().await;
                }
                home.echo(random).await;
            }
        }
    }

    /// At least one and at most so many of the nodes.
    fn some_homes(&self, random: &mut SmallRng, most: usize) -> Vec<Arc<Home>> {
        let mut homes = self.homes.clone();
        homes.shuffle(random);
        homes.truncate(random.random_range(1..=most));
        homes
    }
}
