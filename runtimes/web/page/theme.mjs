/** The light and the dark theme: the system's unless the reader chose the other one, and that is remembered. */

const KEY = 'caracal-theme';
const system = matchMedia('(prefers-color-scheme: dark)');

/** @returns {"light"|"dark"} what is shown now. */
export function currentTheme() {
  return document.documentElement.dataset.theme === 'dark' ? 'dark' : 'light';
}

/**
 * Wires the button that changes the theme.
 * @param {HTMLButtonElement} button
 * @param {() => void} onChange called after the theme has changed, for what is drawn with its colours.
 */
export function setUpTheme(button, onChange) {
  const show = (/** @type {string} */ theme) => {
    const other = theme === 'dark' ? 'light' : 'dark';
    document.documentElement.dataset.theme = theme;
    button.textContent = other === 'dark' ? 'Dark theme' : 'Light theme';
  };
  const systemTheme = () => (system.matches ? 'dark' : 'light');
  show(currentTheme());
  button.addEventListener('click', () => {
    const theme = currentTheme() === 'dark' ? 'light' : 'dark';
    // The system's own theme is not stored, so that the page follows the system again.
    remember(theme === systemTheme() ? null : theme);
    show(theme);
    onChange();
  });
  system.addEventListener('change', () => {
    if (remembered() !== null) return;
    show(systemTheme());
    onChange();
  });
}

function remembered() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null;
  }
}

/** @param {string|null} theme null forgets */
function remember(theme) {
  try {
    if (theme === null) localStorage.removeItem(KEY);
    else localStorage.setItem(KEY, theme);
  } catch {
    // Storage is blocked: the choice lasts as long as the page.
  }
}
