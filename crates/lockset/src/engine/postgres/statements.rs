//! The calls of the schema's functions.

/// A function of the schema.
#[derive(Clone, Copy, Debug)]
pub(super) enum Call {
    Exchange,
    ExchangeAll,
    Heartbeat,
    Renew,
    Amend,
    Adopt,
    ForceRelease,
    Swap,
    Inspect,
    Watch,
    Sweep,
}

impl Call {
    pub(super) const COUNT: usize = Call::Sweep as usize + 1;

    const ALL: [Call; Call::COUNT] = [
        Call::Exchange,
        Call::ExchangeAll,
        Call::Heartbeat,
        Call::Renew,
        Call::Amend,
        Call::Adopt,
        Call::ForceRelease,
        Call::Swap,
        Call::Inspect,
        Call::Watch,
        Call::Sweep,
    ];

    /// Claim ids are sent and returned as texts.
    const fn template(self) -> &'static str {
        match self {
            Call::Exchange => {
                "SELECT released, kind, given, stamp, ahead, left_ms FROM @schema@.exchange(\
                 $1, $2, $3::text::uuid, $4, $5, $6::text::uuid, $7, $8, $9, $10, $11, $12, $13, \
                 $14, $15, $16)"
            }
            Call::ExchangeAll => {
                "SELECT released, kind, given, stamp, ahead, left_ms FROM @schema@.exchange_all(\
                 $1, $2, $3::text[]::uuid[], $4, $5, $6::text[]::uuid[], $7, $8, $9, $10, $11, \
                 $12, $13, $14, $15, $16)"
            }
            Call::Heartbeat => {
                "SELECT kind, given, stamp, ahead, left_ms \
                 FROM @schema@.heartbeat($1, $2, $3::text[]::uuid[])"
            }
            Call::Renew => {
                "SELECT left_ms FROM @schema@.renew($1, $2, $3::text[]::uuid[], $4, $5, $6)"
            }
            Call::Amend => "SELECT @schema@.amend($1, $2::text::uuid, $3, $4, $5, $6, $7)",
            Call::Adopt => {
                "SELECT @schema@.adopt($1, $2::text::uuid, $3, $4::text::uuid, $5, $6, $7)"
            }
            Call::ForceRelease => {
                "SELECT id::text, token, mode, take, lim, left_ms, signed, note \
                 FROM @schema@.force_release($1, $2)"
            }
            Call::Swap => "SELECT done, version, value FROM @schema@.swap($1, $2, $3)",
            Call::Inspect => {
                "SELECT name, kind, id::text, number, mode, take, lim, left_ms, revoked, signed, \
                 note, value FROM @schema@.inspect($1, $2)"
            }
            Call::Watch => "SELECT @schema@.watch($1, $2, $3)",
            Call::Sweep => "SELECT @schema@.sweep()",
        }
    }
}

/// The texts of all calls, for one schema.
#[derive(Debug)]
pub(super) struct Calls([String; Call::COUNT]);

impl Calls {
    pub(super) fn new(schema: &str) -> Self {
        Self(Call::ALL.map(|call| call.template().replace("@schema@", schema)))
    }

    pub(super) fn text(&self, call: Call) -> &str {
        &self.0[call as usize]
    }
}
