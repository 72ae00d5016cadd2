//! Cells: versioned values, for latches and barriers.

use super::RedisCore;
use super::error::RedisRequestError;
use super::reply::parse_swap;
use crate::engine::{Swap, Version};
use crate::error::Result;
use crate::name::Name;

impl RedisCore {
    pub(super) async fn cell(
        &self,
        name: &Name,
        expect: Version,
        value: Option<Vec<u8>>,
    ) -> Result<Swap> {
        self.check_name(name)?;
        let keys = self.keys(name);
        let args = [
            expect.0.to_string().into_bytes(),
            u8::from(value.is_some()).to_string().into_bytes(),
            value.unwrap_or_default(),
        ];
        let reply = self.run_script(&self.scripts.cell, &keys, &[keys.cell()], &args).await;
        parse_swap(&reply.map_err(RedisRequestError::into_error)?)
    }
}
