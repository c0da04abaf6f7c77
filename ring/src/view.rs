//! Checked, typed access to mapped bytes: the only place where pointers into
//! shared memory are made.
//!
//! What lies there may be written by another process at any moment, a hostile
//! one included. So nothing here gives out a Rust reference to plain shared
//! bytes: words are atomics, and bytes are only copied in or out. A copy that
//! races with a foreign write gives bytes of either, which the caller treats as
//! input; the cursors of [`crate::record_ring`] keep honest processes apart.
//!
//! Under loom the same operations run on loom's cells, which report a race.

#[cfg(not(loom))]
pub use mapped::Area;

#[cfg(loom)]
pub use modelled::Area;

#[cfg(not(loom))]
mod mapped {
    use crate::atomic::{AtomicU64, Ordering};
    use std::marker::PhantomData;

    /// The bytes of one ring: a power of two, aligned to 8.
    #[derive(Clone, Copy)]
    pub struct Area<'a> {
        start: *mut u8,
        len: usize,
        mapping: PhantomData<&'a ()>,
    }

    // SAFETY: the pointer is only used for atomic loads and stores and for
    // copies of bytes, which other processes may do at the same time anyway.
    unsafe impl Send for Area<'_> {}
    // SAFETY: as for Send.
    unsafe impl Sync for Area<'_> {}

    impl<'a> Area<'a> {
        /// # Safety
        /// `start` is aligned to 8, and `len` bytes from it stay mapped readable
        /// and writable for `'a`.
        pub(crate) unsafe fn new(start: *mut u8, len: usize) -> Area<'a> {
            debug_assert!((start as usize).is_multiple_of(8) && len.is_power_of_two());
            Area {
                start,
                len,
                mapping: PhantomData,
            }
        }

        /// Size in bytes.
        #[inline]
        pub fn size(&self) -> usize {
            self.len
        }

        #[inline]
        fn at(&self, offset: usize, len: usize) -> *mut u8 {
            assert!(
                offset <= self.len && len <= self.len - offset,
                "access outside of the ring"
            );
            // SAFETY: the assertion keeps the pointer within the area.
            unsafe { self.start.add(offset) }
        }

        #[inline]
        fn word(&self, offset: usize) -> &AtomicU64 {
            assert!(offset.is_multiple_of(8));
            // SAFETY: in bounds by `at`, aligned by the line above and `new`,
            // and any bytes are a valid u64.
            unsafe { AtomicU64::from_ptr(self.at(offset, 8).cast()) }
        }

        /// The eight bytes at `offset`, a multiple of 8.
        #[inline]
        pub fn load(&self, offset: usize) -> u64 {
            // Relaxed: the Acquire load of the ring's tail came before.
            self.word(offset).load(Ordering::Relaxed)
        }

        /// Sets the eight bytes at `offset`, a multiple of 8.
        #[inline]
        pub fn store(&self, offset: usize, value: u64) {
            // Relaxed: the Release store of the ring's tail comes after.
            self.word(offset).store(value, Ordering::Relaxed);
        }

        /// Copies `bytes` in at `offset`.
        #[inline]
        pub fn copy_in(&self, offset: usize, bytes: &[u8]) {
            let to = self.at(offset, bytes.len());
            // SAFETY: in bounds by `at`; private memory and a mapping of the
            // same object never overlap, since no slice of a mapping exists.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) }
        }

        /// Copies `bytes.len()` bytes out from `offset`.
        #[inline]
        pub fn copy_out(&self, offset: usize, bytes: &mut [u8]) {
            let from = self.at(offset, bytes.len());
            // SAFETY: as for `copy_in`.
            unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) }
        }

        /// Appends `len` bytes from `offset` to `bytes`.
        #[inline]
        pub fn append_to(&self, offset: usize, len: usize, bytes: &mut Vec<u8>) {
            let from = self.at(offset, len);
            bytes.reserve(len);
            // SAFETY: `from` is in bounds by `at`; the vector has room for
            // `len` more bytes, which are written before its length says so.
            unsafe {
                std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr().add(bytes.len()), len);
                bytes.set_len(bytes.len() + len);
            }
        }

        /// Copies `len` bytes from `offset` to `to_offset` of another area.
        #[inline]
        pub fn copy_across(&self, offset: usize, to: Area<'_>, to_offset: usize, len: usize) {
            let from = self.at(offset, len);
            let into = to.at(to_offset, len);
            // SAFETY: both in bounds by `at`. `copy` and not
            // `copy_nonoverlapping`: nothing here shows that the areas differ.
            unsafe { std::ptr::copy(from, into, len) }
        }
    }
}

#[cfg(loom)]
mod modelled {
    use loom::cell::UnsafeCell;

    /// The bytes of one ring, as words that loom watches.
    #[derive(Clone, Copy)]
    pub struct Area<'a> {
        words: &'a [UnsafeCell<u64>],
    }

    impl<'a> Area<'a> {
        /// Over words of a model.
        pub fn new(words: &'a [UnsafeCell<u64>]) -> Area<'a> {
            Area { words }
        }

        /// Size in bytes.
        pub fn size(&self) -> usize {
            self.words.len() * 8
        }

        /// The eight bytes at `offset`.
        pub fn load(&self, offset: usize) -> u64 {
            // SAFETY: loom fails the test if a write runs beside this read.
            self.words[offset / 8].with(|word| unsafe { *word })
        }

        /// Sets the eight bytes at `offset`.
        pub fn store(&self, offset: usize, value: u64) {
            // SAFETY: loom fails the test if another access runs beside this.
            self.words[offset / 8].with_mut(|word| unsafe { *word = value });
        }

        /// Copies `bytes`, whole words, in at `offset`.
        pub fn copy_in(&self, offset: usize, bytes: &[u8]) {
            for (index, word) in bytes.chunks(8).enumerate() {
                let mut whole = [0; 8];
                whole[..word.len()].copy_from_slice(word);
                self.store(offset + index * 8, u64::from_ne_bytes(whole));
            }
        }

        /// Copies `bytes.len()` bytes out from `offset`.
        pub fn copy_out(&self, offset: usize, bytes: &mut [u8]) {
            for (index, part) in bytes.chunks_mut(8).enumerate() {
                let word = self.load(offset + index * 8).to_ne_bytes();
                part.copy_from_slice(&word[..part.len()]);
            }
        }
    }
}
