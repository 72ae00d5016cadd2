//! stub
/// x
#[derive(Debug, Default)]
#[allow(missing_docs)]
pub struct LocalOptions {
    pub path: Option<std::path::PathBuf>,
    pub mode: u32,
    pub holder_process: Option<u32>,
}
#[allow(missing_docs)]
#[derive(Debug)]
pub enum Local {}
#[allow(missing_docs, clippy::missing_errors_doc)]
impl Local {
    pub fn open(_: LocalOptions) -> crate::Result<crate::engine::memory::Memory> {
        Ok(crate::engine::memory::Memory::new(crate::clock::Clock::boot()))
    }
}
