// A classic script in the head: the theme is set before anything is painted. theme.mjs does the rest.
(function () {
  let chosen = null;
  try {
    chosen = localStorage.getItem('caracal-theme');
  } catch {
    // Storage is blocked: the system's theme is used.
  }
  const system = matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light';
  document.documentElement.dataset.theme = chosen === 'dark' || chosen === 'light' ? chosen : system;
})();
