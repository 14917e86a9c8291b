//! The functions of libc that ours stand before.

use std::ffi::{CStr, c_void};
use std::marker::PhantomData;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use nix::libc;

/// One function: looked up once, then a load.
pub struct Real<F> {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
    kind: PhantomData<fn() -> F>,
}

impl<F: Copy> Real<F> {
    /// # Safety
    /// `F` is the type of a pointer to the function of that name.
    pub const unsafe fn named(name: &'static CStr) -> Self {
        assert!(size_of::<F>() == size_of::<*mut c_void>(), "a function pointer is meant");
        Self { name, address: AtomicPtr::new(ptr::null_mut()), kind: PhantomData }
    }

    /// The function; `None` if this libc does not have it.
    #[inline]
    pub fn get(&self) -> Option<F> {
        let mut address = self.address.load(Ordering::Relaxed);
        if address.is_null() {
            address = self.look_up()?;
        }
        // SAFETY: F is a pointer to this function, as whoever made self vouches for, and of the same size as asserted there.
        Some(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&address) })
    }

    /// Whoever comes first looks it up: all find the same. It is done when this library is loaded, so that it is not left
    /// to a signal handler.
    #[cold]
    pub fn look_up(&self) -> Option<*mut c_void> {
        // SAFETY: the name is a C string; dlsym finds what comes after this library.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.address.store(found, Ordering::Relaxed);
        (!found.is_null()).then_some(found)
    }
}

/// `-1` and `errno`, for a function that this libc lacks.
pub fn missing() -> libc::c_int {
    nix::errno::Errno::ENOSYS.set();
    -1
}

/// Something that is looked up once.
pub trait Resolve: Sync {
    /// Looks it up.
    fn resolve(&self);
}

impl<F: Copy> Resolve for Real<F> {
    fn resolve(&self) {
        // What this libc lacks nobody calls.
        let _ = self.look_up();
    }
}

/// Declares the real functions of a file of hooks, and `REAL`, all of them.
macro_rules! real {
    ($($static:ident = $name:literal: fn($($argument:ty),* $(,)?) -> $result:ty;)*) => {
        $(
            static $static: $crate::libc_next::Real<unsafe extern "C-unwind" fn($($argument),*) -> $result> =
                // SAFETY: the type is that of the function in libc's headers; variadic ones as the module says.
                unsafe { $crate::libc_next::Real::named($name) };
        )*
        /// The real functions.
        pub static REAL: &[&dyn $crate::libc_next::Resolve] = &[$(&$static),*];
    };
}
pub(crate) use real;
