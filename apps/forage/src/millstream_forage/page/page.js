// Forage's page: shows a reader's next seven items, and posts what the reader does with them.
//
// The feed is asked for every five seconds, and at once after a signal. The server repeats a feed until something changes, so
// a poll is no look. A request that a later one has overtaken is dropped: it could bring a skipped card back.
"use strict";

const POLL_MS = 5000;
const SLOTS = 7;
const LABELS = { match: "match", exploring: "exploring", none: "by your reactions" };
const KEYS = { s: "save", x: "skip", h: "hide", m: "mute", b: "block" };

const byId = (id) => document.getElementById(id);
const feedList = byId("feed");
const template = byId("card");
const asked = new URLSearchParams(location.search).get("user") ?? "1";
let user = /^[0-9]{1,16}$/.test(asked) ? Number(asked) : 1;
let loads = 0;
let shown = null; // the feed on the page
let undoing = null; // the target that Undo shows again
let opened = null; // the item that the reader opened, and since when
let unreachable = false; // the problem on the page is that no feed came; an action's stays until another one succeeds
const gone = new Map(); // items that were skipped or hidden here, and not yet by the server's answer: id to true

async function call(path, body) {
  const headers = { accept: "application/json" };
  const token = sessionStorage.getItem("token");
  if (token) headers.authorization = `Bearer ${token}`;
  if (body) headers["content-type"] = "application/json";
  const response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body) });
  const answer = await response.json();
  if (response.ok) return answer;
  if (response.status === 401) byId("access").hidden = false;
  throw new Error([answer.detail, answer.hint].filter(Boolean).join(". "));
}

function tell(problem) {
  byId("problem").hidden = !problem;
  byId("problem").textContent = problem ?? "";
}

function say(text, target) {
  undoing = target ?? null;
  byId("said").textContent = text;
  byId("undo").hidden = !undoing;
}

async function refresh() {
  const load = ++loads;
  try {
    const feed = await call(`/feed?user=${user}&limit=${SLOTS}`);
    if (load !== loads) return;
    if (unreachable) tell(null);
    unreachable = false;
    byId("access").hidden = true;
    render(feed);
  } catch (error) {
    if (load !== loads) return;
    unreachable = true;
    tell(error instanceof TypeError ? "The server can't be reached. The page tries again." : error.message);
  }
}

function render(feed) {
  const same = shown && shown.user === user && shown.feed.feed_id === feed.feed_id && feed.items.length === feedList.children.length;
  feedList.setAttribute("aria-busy", "false");
  if (same && feed.feed_id !== null) return;
  const focus = focused();
  shown = { user, feed };
  const items = feed.items.filter((item) => !gone.has(item.item_id));
  feedList.replaceChildren(...items.map(card));
  byId("nothing").hidden = items.length > 0;
  byId("feed-facts").textContent = `${feed.policy} · seed ${feed.seed} · token ${feed.token}`;
  restore(focus);
}

function card(item) {
  const node = template.content.firstElementChild.cloneNode(true);
  const set = (selector, text) => { node.querySelector(selector).textContent = text; };
  node.dataset.item = item.item_id;
  set(".slot", item.slot);
  set(".label", LABELS[item.label]);
  node.querySelector(".label").dataset.label = item.label;
  node.querySelector(".explore").hidden = !item.explore;
  const link = node.querySelector("h2 a");
  link.textContent = item.title;
  link.href = item.url;
  set(".category", item.category);
  set(".creator", item.creator);
  set(".source", item.source);
  set(".minutes", `${item.reading_time_min} min`);
  set(".summary", item.summary);
  set(".reason", item.reason);
  node.querySelector(".tags").append(...item.tags.map((tag) => Object.assign(document.createElement("li"), { textContent: tag })));
  node.querySelector(".dot").style.background = `hsl(${hue(item.category)} 45% 50%)`;
  bar(node.querySelector(".similarity"), item.similarity, item.threshold, (value) => value.toFixed(2), "from");
  bar(node.querySelector(".share"), item.category_share, item.target_share, (value) => `${Math.round(100 * value)} %`, "target");
  set(".propensity .number", item.propensity.toPrecision(3));
  set("[data-action=mute]", `Mute ${item.source}`);
  set("[data-action=block]", `Block ${item.creator}`);
  for (const name of ["save", "skip", "hide"]) {
    const button = node.querySelector(`[data-action=${name}]`);
    button.setAttribute("aria-label", `${button.textContent} “${item.title}”`);
  }
  link.addEventListener("click", () => act("view", item));
  for (const button of node.querySelectorAll("button")) button.addEventListener("click", () => act(button.dataset.action, item));
  return node;
}

function bar(node, value, mark, text, meaning) {
  const percent = (part) => `${Math.min(100, Math.max(0, 100 * part))}%`;
  node.querySelector("i").style.width = percent(value);
  node.querySelector("b").style.left = percent(mark);
  node.querySelector(".number").textContent = `${text(value)} (${meaning} ${text(mark)})`;
}

function hue(name) {
  let sum = 0;
  for (const letter of name) sum = (sum * 31 + letter.codePointAt(0)) % 360;
  return sum;
}

async function act(action, item) {
  const reader = user;
  const signal = (type, more) =>
    call("/signal", { user_id: reader, item_id: item.item_id, signal_type: type, impression_id: item.impression_id, ...more });
  const hide = (kind, target) => call("/hide", { user_id: reader, kind, target });
  const actions = {
    view: { post: () => signal("view") },
    save: { post: () => signal("save"), said: `Saved “${item.title}”.` },
    skip: { post: () => signal("skip"), said: `Skipped “${item.title}”.`, target: { item: item.item_id }, goes: (other) => other.item_id === item.item_id },
    hide: { post: () => hide("hide", { item: item.item_id }), said: `Hid “${item.title}”.`, target: { item: item.item_id }, goes: (other) => other.item_id === item.item_id },
    mute: { post: () => hide("mute", { source: item.source }), said: `Muted ${item.source}.`, target: { source: item.source }, goes: (other) => other.source === item.source },
    block: { post: () => hide("block", { creator: item.creator }), said: `Blocked ${item.creator}.`, target: { creator: item.creator }, goes: (other) => other.creator === item.creator },
  };
  const { post, said, target, goes } = actions[action];
  if (action === "view") opened = { item, reader, since: performance.now() };
  loads += 1; // answers that are on their way don't know of this
  const left = goes ? shown.feed.items.filter(goes).map((other) => other.item_id) : [];
  for (const id of left) gone.set(id, true);
  take(left);
  try {
    await post();
    tell(null);
    if (said) say(said, target && { reader, target });
  } catch (error) {
    shown.feed = { ...shown.feed, feed_id: null }; // what was taken away comes back with the next feed
    tell(error.message);
  }
  for (const id of left) gone.delete(id);
  await refresh();
}

function take(ids) {
  const focus = focused();
  for (const node of [...feedList.children]) if (ids.includes(Number(node.dataset.item))) node.remove();
  restore(focus);
}

async function undo() {
  if (!undoing) return;
  const { reader, target } = undoing;
  say("");
  try {
    await call("/hide", { user_id: reader, kind: "unhide", target });
    tell(null);
    say("It may be shown again.");
  } catch (error) {
    tell(error.message);
  }
  await refresh();
}

// --- the keyboard ---

function focused() {
  const at = [...feedList.children].findIndex((node) => node.contains(document.activeElement));
  return at < 0 ? null : { at, action: document.activeElement.dataset.action ?? null };
}

function restore(focus) {
  if (!focus || feedList.contains(document.activeElement)) return;
  const node = feedList.children[Math.min(focus.at, feedList.children.length - 1)];
  const next = node?.querySelector(focus.action ? `[data-action=${focus.action}]` : "h2 a");
  (next ?? feedList).focus({ preventScroll: true });
}

function step(by) {
  const at = focused()?.at ?? (by > 0 ? -1 : feedList.children.length);
  const node = feedList.children[Math.max(0, Math.min(feedList.children.length - 1, at + by))];
  node?.querySelector("h2 a").focus();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || event.target instanceof HTMLInputElement) return;
  const at = focused()?.at;
  if (event.key === "j" || event.key === "ArrowDown") step(1);
  else if (event.key === "k" || event.key === "ArrowUp") step(-1);
  else if (event.key === "u") undo();
  else if (event.key in KEYS && at !== undefined) feedList.children[at].querySelector(`[data-action=${KEYS[event.key]}]`).click();
  else return;
  event.preventDefault();
});

// --- the rest ---

// A reader who comes back has stayed with the item for as long as the page was out of sight.
document.addEventListener("visibilitychange", () => {
  if (document.hidden || !opened) return;
  const { item, reader, since } = opened;
  opened = null;
  const duration_ms = Math.round(performance.now() - since);
  const body = { user_id: reader, item_id: item.item_id, signal_type: "dwell", impression_id: item.impression_id, duration_ms };
  call("/signal", body).then(refresh, (error) => tell(error.message));
});

byId("undo").addEventListener("click", undo);
byId("reader").addEventListener("submit", (event) => {
  event.preventDefault();
  user = Number(byId("user").value);
  history.replaceState(null, "", `?user=${user}`);
  tell(null);
  say("");
  refresh();
});
byId("access").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", byId("token").value.trim());
  refresh();
});
byId("user").value = user;
setInterval(() => { if (!document.hidden) refresh(); }, POLL_MS);
refresh();
